"""Builds Horovod against the installed torch, with MPI where there is one and Gloo, and keeps the wheel.

    python -m tests.support.build_horovod

It takes minutes once, then nothing: wheels are kept in the user's cache, by the versions that they were built from.
Horovod goes to a folder of its own, to be put on PYTHONPATH; the environment that runs this stays as it is.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.28.1"
ADJUSTMENTS = {
    "CMakeLists.txt": ("\nset(CMAKE_CXX_STANDARD 14)", "\nset(CMAKE_CXX_STANDARD 17)"),
    "horovod/torch/CMakeLists.txt": ("    set(CMAKE_CXX_STANDARD 14)", "    set(CMAKE_CXX_STANDARD 17)"),
    "horovod/common/common.h": ("#include <memory>\n", "#include <memory>\n#include <stdexcept>\n"),
    "horovod/common/group_table.h": ("#include <queue>\n", "#include <queue>\n#include <string>\n"),
}
"""What its source lacks for today's torch, which wants C++17, and for today's compilers."""
BUILD_S = 1800


class CannotBuildError(Exception):
    """Horovod cannot be built here; the message says why."""


def tools_path() -> str:
    """Return PATH without this environment's own programs: its mpicxx may belong to another MPI."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join(folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder != own)


def tool(name: str) -> str | None:
    """Return where a program of the system is."""
    return shutil.which(name, path=tools_path())


def horovod() -> Path:
    """Return the folder that holds Horovod, which is built if it has not been.

    Raises:
        CannotBuildError: It cannot be had here.
    """
    folder = _cache() / _key()
    with _locked(folder):
        site = folder / "site"
        if not site.exists():
            wheel = next(folder.glob("*.whl"), None) or _build(folder)
            _install(wheel, site)
    return site


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otel_dltrace-tests"


def _key() -> str:
    """Return a name for what the wheel depends on: versions of Horovod, Python, torch, the compiler and MPI."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise CannotBuildError("torch is not installed") from None
    parts = [torch, sys.version, platform.machine(), *map(_said, ("c++", "mpirun")), str(ADJUSTMENTS)]
    return f"horovod-{VERSION}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _said(program: str) -> str:
    found = tool(program)
    return (
        "" if found is None else subprocess.run([found, "--version"], capture_output=True, check=False).stdout.decode()
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise CannotBuildError(f"{folder} cannot be written ({error.strerror})") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> Path:
    missing = [name for name in ("cmake", "c++", "make") if tool(name) is None]
    if missing:
        raise CannotBuildError(f"there is no {', no '.join(missing)}; `make test-deps` installs what it takes")
    with tempfile.TemporaryDirectory() as work:
        source = _adjusted_source(Path(work))
        with_mpi = "1" if tool("mpicxx") else ""
        env = os.environ | {"PATH": tools_path(), "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1"}
        env |= {"HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1"}
        env |= {"HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI": "1"}
        env.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
        _pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", work, str(source), env=env)
        built = next(Path(work).glob("*.whl"))
        return Path(shutil.move(built, folder / built.name))


def unpack(path: Path, folder: Path) -> None:
    """Unpack the archive *path* into *folder*; by Python's filter for data, which the first 3.10 and 3.11 have not."""
    with tarfile.open(path) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def _adjusted_source(work: Path) -> Path:
    where = ["--no-binary", "horovod", "--no-deps", "--no-build-isolation", "--dest", str(work)]
    _pip("download", *where, f"horovod=={VERSION}")
    unpack(work / f"horovod-{VERSION}.tar.gz", work)
    source = work / f"horovod-{VERSION}"
    for name, (before, after) in ADJUSTMENTS.items():
        text = (source / name).read_text()
        assert before in text, f"{name} of Horovod {VERSION} is not what it was"
        (source / name).write_text(text.replace(before, after, 1))
    return source


def _install(wheel: Path, site: Path) -> None:
    """Unpack *wheel* and what only it needs to *site*, whole or not at all."""
    partial = site.with_name("site.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _pip("install", "--no-deps", "--target", str(partial), str(wheel), "cloudpickle", "pyyaml", "packaging")
    partial.rename(site)


def _pip(*arguments: str, env: dict[str, str] | None = None) -> None:
    command = ["nice", sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(f"pip {arguments[0]} did not end ({error})") from None
    if done.returncode:
        raise CannotBuildError(f"pip {arguments[0]} failed: {done.stderr.strip()[-600:]}")


if __name__ == "__main__":
    try:
        print(f"Horovod {VERSION} is in {horovod()}")
    except CannotBuildError as error:
        print(f"Horovod cannot be built, and the tests that want it are skipped: {error}")
