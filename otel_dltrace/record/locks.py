"""The files by which a host's processes agree who drains: locks, each held by one, and bells, which wake a drain."""

import errno
import fcntl
import os
from pathlib import Path

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
"""The errors of a process, or a host, that has no descriptor left: that passes, and says nothing of a lock."""
_TO_RING = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def take_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock *path*, None while another process holds it.

    Raises:
        OSError: It cannot be opened, or not be locked at all; `TOO_MANY_FILES` pass.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        except OSError:  # that is no lock of another's: kept open, this one would be ours for as long as we live
            os.close(fd)
            raise
        os.close(fd)  # its last holder removed the file between our two steps


def is_ours_to_take(path: Path) -> bool:
    """Return whether the lock *path* is not the file of another user, who alone may take it, held or left behind."""
    return not path.exists() or os.access(path, os.R_OK | os.W_OK)


def lock_is_held(path: Path) -> bool:
    """Return whether some process of this user holds the lock *path*."""
    if not path.exists() or not is_ours_to_take(path):
        return False
    fd = take_lock(path)
    if fd is not None:
        os.close(fd)
    return fd is None


def is_listened_to(bell: Path) -> bool:
    """Return whether a drain listens to *bell*, as far as can be told: another user's may be rung by that one alone."""
    try:
        os.close(os.open(bell, _TO_RING))
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def ring_bell(bell: Path) -> None:
    """Wake the drain, if one listens."""
    try:
        fd = os.open(bell, _TO_RING)
    except OSError:
        return
    try:
        os.write(fd, b"!")
    except OSError:
        pass  # the bell is full: it will be heard anyway
    finally:
        os.close(fd)
