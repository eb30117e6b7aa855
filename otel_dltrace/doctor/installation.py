"""The installation: versions, entry points, the .pth file, and who else traces the same program."""

import os
import platform
import site
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, version
from pathlib import Path

from otel_dltrace._version import __version__
from otel_dltrace.doctor.child import Child
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding
from otel_dltrace.settings.config import SWITCH
from otel_dltrace.settings.said import said
from otel_dltrace.settings.switch import is_switched_off

PACKAGE = "otel-dltrace"
PTH = "otel_dltrace.pth"
_LIBRARIES = (
    "numpy",
    "pyarrow",
    "psutil",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "grpcio",
    "protobuf",
    "requests",
)
_BESIDE = ("opentelemetry-instrumentation", "opentelemetry-distro", "ddtrace", "nemo-lens")
_MUST_AGREE = ("opentelemetry-instrumentation", "opentelemetry-distro")
OTHERS = "others"
# What each puts on PYTHONPATH for its sitecustomize.
_OPENTELEMETRY, _DDTRACE = "opentelemetry/instrumentation/auto_instrumentation", "ddtrace/bootstrap"
_DDTRACE_TORCH = "DD_TRACE_PYTORCH_ENABLED"
_AUTOSTARTED = "import json, sys; answer = 'otel_dltrace.autostart' in sys.modules"


def versions() -> list[Finding]:
    """Return the versions of Python, of us, and of what we need; a library that is missing is a problem."""
    python = f"otel-dltrace {__version__} on {platform.python_implementation()} {platform.python_version()}"
    found = [Finding("versions", FINE, f"{python}, {platform.system()} {platform.machine()}")]
    there = {name: number for name in (*_LIBRARIES, *_BESIDE) if (number := version_of(name))}
    found.append(Finding("versions", FINE, ", ".join(f"{name} {number}" for name, number in there.items())))
    missing = [name for name in _LIBRARIES if name not in there]
    if missing:
        what = f"{', '.join(missing)} is missing: the drain and the commands need it"
        found.append(Finding("versions", PROBLEM, what, f"pip install {PACKAGE}"))
    beside = {name: there[name] for name in _MUST_AGREE if name in there}
    if len(set(beside.values())) > 1:
        what = " and ".join(f"{name} {number}" for name, number in beside.items()) + " are of different releases"
        found.append(Finding("versions", NOTE, what, f"pip install --upgrade {' '.join(beside)}"))
    return found


def version_of(name: str) -> str:
    """Return the version of the distribution *name*, "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def entry_points() -> list[Finding]:
    """Return whether OpenTelemetry finds our plugins, and whether each can be loaded."""
    try:
        ours = distribution(PACKAGE).entry_points
    except PackageNotFoundError:
        what = f"{PACKAGE} is not installed for {sys.executable}, so OpenTelemetry finds no plugin of ours"
        return [Finding("entry points", PROBLEM, what, f"pip install {PACKAGE} with that Python")]
    plugins = [point for point in ours if point.group.startswith("opentelemetry_")]
    has_otel = bool(version_of("opentelemetry-instrumentation"))
    broken = [
        Finding(
            "entry points", PROBLEM, f"{point.name} ({point.value}) cannot be loaded: {error}", f"reinstall {PACKAGE}"
        )
        for point in plugins
        if (has_otel or point.group != "opentelemetry_instrumentor") and (error := _cannot_load(point))
    ]
    groups = {point.group: ", ".join(one.name for one in plugins if one.group == point.group) for point in plugins}
    plugged = "; ".join(f"{group.removeprefix('opentelemetry_')}: {names}" for group, names in sorted(groups.items()))
    found = [Finding("entry points", FINE, f"OpenTelemetry finds {plugged}")]
    if not has_otel:
        what = "opentelemetry-instrument is not installed; OTEL_DLTRACE=1 does the same"
        found.append(Finding("entry points", FINE, what, f"pip install '{PACKAGE}[otel]' to use it"))
    return [*found, *broken]


def _cannot_load(point: EntryPoint) -> str:
    try:
        point.load()
    except (ImportError, AttributeError) as error:
        return str(error)
    return ""


def pth() -> list[Finding]:
    """Return whether the .pth file is where Python reads it, and whether it switches tracing on in a new process."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    there = [str(Path(folder) / PTH) for folder in folders if _is_file(Path(folder) / PTH)]
    child = Child.ask(_AUTOSTARTED, {SWITCH: "1", "OTEL_DLTRACE_DRAIN": "off"})
    how = f"OTEL_DLTRACE=1 switches tracing on in a new process of {sys.executable}"
    if child.answer is True:
        return [Finding(".pth", FINE, f"{how} ({there[0]})" if there else how)]
    if child.answer is None:
        return [Finding(".pth", PROBLEM, f"{sys.executable} cannot start a process: {child.trouble}")]
    cure = f"pip install {PACKAGE} again, or call otel_dltrace.instrument() first in the program"
    if there:
        cure = "do not start Python with -S or -I, and see what comes before it: python -v"
    where = f"is at {there[0]}, and not read" if there else f"is in none of {', '.join(folders)}"
    return [Finding(".pth", PROBLEM, f"{PTH} {where}: OTEL_DLTRACE=1 does nothing", cure)]


def _is_file(path: Path) -> bool:
    """Return whether Python reads *path*: not in a folder that we may not enter, where `Path.is_file` raises."""
    return os.path.isfile(path)  # noqa: PTH113


def others(env: Mapping[str, str]) -> list[Finding]:
    """Return who else traces programs started with *env*."""
    folders = [folder.rstrip("/") for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    found = [*_injectors(folders, env), *_customised(folders)]
    return found or [Finding(OTHERS, FINE, "nothing else traces programs started with this environment")]


def _injectors(folders: list[str], env: Mapping[str, str]) -> Iterator[Finding]:
    if any(folder.endswith(_OPENTELEMETRY) for folder in folders):
        yield _instrumented(env)
    if any(folder.endswith(_DDTRACE) for folder in folders):
        if env.get(_DDTRACE_TORCH, "").strip().lower() in ("1", "true"):
            what = (
                f"ddtrace-run traces torch as well ({_DDTRACE_TORCH}): both wrap Optimizer.step and init_process_group"
            )
            yield Finding(OTHERS, PROBLEM, what, f"unset {_DDTRACE_TORCH}, or leave one of the two out")
        else:
            yield Finding(
                OTHERS, NOTE, f"ddtrace-run traces the program except for torch, as {_DDTRACE_TORCH} is not set"
            )


def _instrumented(env: Mapping[str, str]) -> Finding:
    """Return what ``opentelemetry-instrument`` does with us; where a variable cannot be read, nothing is traced."""
    try:
        is_off = is_switched_off(env)
    except ConfigError:
        is_off = True
    if is_off:
        return Finding(OTHERS, FINE, "opentelemetry-instrument leaves tracing off, as the environment says")
    if said(env, SWITCH):
        what = "opentelemetry-instrument switches tracing on, and so does OTEL_DLTRACE: done once"
        return Finding(OTHERS, NOTE, what, "one of the two is enough")
    return Finding(OTHERS, FINE, "opentelemetry-instrument switches tracing on")


def _customised(folders: list[str]) -> Iterator[Finding]:
    """Yield a finding where one sitecustomize hides another: Python runs the first alone."""
    there = [folder for folder in folders if _is_file(Path(folder) / "sitecustomize.py")]
    if len(there) > 1:
        what = f"{there[0]}/sitecustomize.py may hide {', '.join(f'{folder}/sitecustomize.py' for folder in there[1:])}"
        yield Finding(
            OTHERS, NOTE, what, "Python runs only the first on PYTHONPATH: put the one that runs the next first"
        )
