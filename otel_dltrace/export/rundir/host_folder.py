"""Where a run's spans go: its directory, and in it a folder for each host, which one drain has at a time."""

import errno
import fcntl
import os
import socket
from itertools import count
from pathlib import Path

from otel_dltrace.export.files import open_own
from otel_dltrace.model.identity import Bind, run_directory_name

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What a file system says of what was removed; NFS the last, of a file that is still open here."""


def run_root(parent: Path, bind: Bind | None, nonce: int) -> Path:
    """Return where a process's spans go: the generation's directory, a hidden partial one until it has a name."""
    if bind is None:
        return parent / f".dltrace-{nonce.to_bytes(8, 'little').hex()}.partial"
    return parent / run_directory_name(bind)


def remove_tree(folder: Path) -> None:
    """Remove *folder* and what is in it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def host_folder_name(host: str, boot_id: str) -> str:
    """Return the name of a host's folder: no other host, and no other boot, writes there."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in host) or socket.gethostname()
    return f"{safe}-{boot_id[:8] or 'unknown'}"


class HostFolder:
    """The folder of this host, made and had by nobody else; another drain of the host has the next one.

    That is the drain of a second container, or of other settings.

    Attributes:
        path: The folder, or what it will be.

    Args:
        path: Of the first one; the next ones are called after it.
        begun: Of the one in which an earlier drain's work is to go on.
    """

    def __init__(self, path: Path, begun: Path | None = None) -> None:
        self.path = path
        self._host, self._nth = path.name, 1
        if begun is not None and (nth := begun.name.removeprefix(f"{path.name}-")).isdecimal():
            self.path, self._nth = begun, int(nth)
        self._lock = -1

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed the folder that was ours, or moved it away."""
        if self._lock < 0:
            return False
        try:
            return not os.path.samestat(os.fstat(self._lock), (self.path / ".lock").stat())
        except OSError as error:  # another one says nothing of it: who writes next is told what is wrong
            return error.errno in _GONE

    def take(self) -> None:
        """Make the folder and have it for this process alone, unless we do."""
        if self._lock >= 0:
            return
        for nth in count(self._nth):
            path = self.path.with_name(self._host if nth == 1 else f"{self._host}-{nth}")
            lock = lock_folder(path)
            if lock is not None:
                self.path, self._lock, self._nth = path, lock, nth
                return

    def leave(self) -> None:
        """Let others have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def is_locked_here(folder: Path) -> bool:
    """Return whether a process that we can see, of this host, keeps *folder* for itself.

    The kernel's list tells. To ask the lock we would have to open it; and who closes it again gives up its own.
    """
    try:
        lock = (folder / ".lock").stat()
        held = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    return f" {os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino} " in held


def lock_folder(folder: Path) -> int | None:
    """Make *folder*; return the descriptor that keeps it for this process alone, None if it is another's."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_own(folder / ".lock", 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # either says that it is locked
        os.close(lock)
        return None
    except OSError:
        pass  # a file system without locks
    return lock
