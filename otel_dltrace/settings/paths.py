"""Folders and files that the configuration names, and where they are relative to."""

import os
from collections.abc import Mapping
from pathlib import Path

from otel_dltrace.model.errors import FieldError

BEGAN_IN = "_OTEL_DLTRACE_BEGAN_IN"
"""Set by ``otel-dltrace run``: its working directory, which its program may leave before it starts what is traced."""


def working_directory() -> str:
    """Return the working directory, "" where it has been removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def began_in(env: Mapping[str, str], here: str) -> str:
    """Return the folder that this job began in: that of ``otel-dltrace run``, if it can be written, or *here*."""
    began = env.get(BEGAN_IN, "")
    return began if os.access(began, os.W_OK) else here


def which(folder: str) -> str:
    """Return what tells *folder* from others of its path, as containers that share ``/dev/shm`` have; "" if unknown."""
    try:
        found = os.stat(folder)  # noqa: PTH116  -- "", which is nowhere, would be `Path.cwd()`
    except OSError:
        return ""
    return f"{found.st_dev}.{found.st_ino}"


def absolute(name: str, path: str) -> str:
    """Return *path*, the value of field *name*, as an absolute one.

    Raises:
        FieldError: It cannot be one, or none that we can use.
    """
    try:
        whole = str(Path(path).expanduser().absolute())
        whole.encode()
    except RuntimeError:
        raise FieldError(name, path, " names a user who has no home directory") from None
    except FileNotFoundError:
        raise FieldError(
            name, path, " is relative to the working directory, which has been removed: name one that exists"
        ) from None
    except UnicodeEncodeError:
        raise FieldError(name, whole, " is not UTF-8; Arrow's files need a folder that is") from None
    if "\0" in whole:
        raise FieldError(name, whole, " is not a path: a file name cannot contain a NUL")
    return whole


def as_said(path: str) -> str:
    """Return how a variable says the absolute *path*: of one that ends in blanks they would be no part (`said`)."""
    return path if path == path.rstrip() else f"{path}/"


def seen_from(here: str, path: object) -> object:
    """Return *path*, if it is one that is relative, as seen from the folder *here*."""
    is_relative = isinstance(path, str | os.PathLike) and not str(path).startswith("~")
    return str(Path(here, path)) if is_relative else path  # type: ignore[arg-type]  # it is a path then


def check_writable(name: str, directory: Path) -> None:
    """Raise unless *directory*, or what is there of its parents, takes new files; leave nothing behind.

    Raises:
        FieldError: It does not; *name* is the field that names it.
    """
    try:
        there = next(path for path in (directory, *directory.parents) if _is_there(path))
        # Of a name that nobody can have taken before us, with a link or a pipe.
        probe = there / f".otel_dltrace-{os.getpid()}-{os.urandom(4).hex()}"
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise FieldError(name, str(directory), f" cannot be written: {error.strerror}") from None


def _is_there(path: Path) -> bool:
    """Return whether there is something at *path*; since Python 3.14 `Path.exists` takes any error for a no.

    Raises:
        OSError: It cannot be told, as of a name that is too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
