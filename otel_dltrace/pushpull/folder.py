"""The folder of a job that `launch` started: locked for as long as the launcher lives, and removed by the next one."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from otel_dltrace.model.errors import ConfigError

SHARED = Path("/dev/shm")  # noqa: S108 - what is made in it is ours alone
_PREFIX = "dltrace-pushpull-job-"
_NAME = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")
"""As `tempfile.mkdtemp` has it; those of processes without a launcher (options.py) go on with a number and a hyphen."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextmanager
def job_folder() -> Iterator[Path]:
    """Make a folder for us alone, which is locked, and removed behind the block."""
    folder, lock = _made()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_orphans() -> None:
    """Remove our folders whose launcher was killed: nobody has locked them."""
    for folder in [one for parent in _parents() for one in parent.glob(f"{_PREFIX}*")]:
        if _NAME.fullmatch(folder.name):
            with suppress(OSError):  # it is gone by now, or somebody else's, or has its launcher
                _remove_orphan(folder)


def _parents() -> set[Path]:
    with suppress(ConfigError):
        return {SHARED, temporary()}
    return {SHARED}


def _remove_orphan(folder: Path) -> None:
    lock = os.open(folder, _FOLDER)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _made() -> tuple[Path, int]:
    """Return a new folder and the descriptor that locks it; another launcher may remove it before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_memory()))
        with suppress(FileNotFoundError):
            lock = os.open(folder, _FOLDER)
            with suppress(OSError):  # a file system without locks: then nobody takes it for an orphan either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(lock, folder):
                return folder, lock
            os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _memory() -> Path:
    parent = where_ranks_meet()
    return parent if shutil.disk_usage(parent).free else temporary()


def where_ranks_meet() -> Path:
    """Return where folders for local ranks are made: in memory, unless we may make none there, as in some containers.

    Raises:
        ConfigError: No folder can be written.
    """
    return SHARED if os.access(SHARED, os.W_OK | os.X_OK, effective_ids=True) else temporary()


def temporary() -> Path:
    """Return where temporary files go.

    Raises:
        ConfigError: No folder can be written.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise ConfigError("local ranks find no writable folder: set TMPDIR to one") from None
