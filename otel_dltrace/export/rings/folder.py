"""The folder of rings as one drain sees it: which of them are its own to read."""

import errno
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from otel_dltrace.export.rings.cursor import Cursor
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.errors import RingError
from otel_dltrace.record import guard
from otel_dltrace.record.launch import ALL_RINGS
from otel_dltrace.record.locks import TOO_MANY_FILES, is_ours_to_take, lock_is_held, take_lock
from otel_dltrace.record.ring_file import open_for_reading, take_for_reading, version_of, writer_is_alive

UNBORN_S = 60.0
LOG_S = 86_400.0
"""How long what a drain complained of stays in the folder after its end."""
_PASSING = (*TOO_MANY_FILES, errno.ENOMEM, errno.EIO, errno.ESTALE)
"""What is wrong with this process, its host or a disk for a while, and not with a ring."""


class RingFolder:
    """Finds rings, and takes them for reading.

    Attributes:
        refused: Rings that are left where they are, and why; "" for another drain's.
        unread: Those of them in which there may be what was not read.
        own: This process's own ring, where the drain is one of its threads: path and bytes. No other is read then.
        among: Where only some of the rings are to be read, these.

    Args:
        serving: Which rings.
    """

    def __init__(self, serving: Serving) -> None:
        self.refused: dict[Path, str] = {}
        self.unread: set[Path] = set()
        self.own: tuple[Path, Any] | None = None
        self.among: set[Path] | None = None
        self._serving = serving
        self._locks: dict[str, int] = {}

    def take(self, followed: Collection[Path]) -> Iterator[tuple[RingSource, Cursor]]:
        """Yield each ring that has come, but those *followed*, and where its reading stopped."""
        found = self._found()
        for path in found.difference(followed, self.refused):
            if (self.own is None or path == self.own[0]) and (self.among is None or path in self.among):
                yield from self._take(path)
        # Other drains' rings come and go for as long as this one serves.
        self.refused = {path: reason for path, reason in self.refused.items() if reason or path in found}

    def _found(self) -> set[Path]:
        folder = self._serving.rings
        try:
            found = _rings_in(folder)
        except FileNotFoundError:
            return set()
        except OSError as error:
            self.wait_for(folder, error)
            return set()
        self.unread.discard(folder)
        return found

    def _take(self, path: Path) -> Iterator[tuple[RingSource, Cursor]]:
        state = path.with_suffix(".cursor")
        changed, cursor = version_of(state), Cursor.read(state)
        try:
            source = RingSource(path, cursor.taken, cursor.unfinished, self.own[1] if self.own else None)
        except RingError as error:
            if getattr(error.__cause__, "errno", 0) in _PASSING:
                self.wait_for(path, error)
            elif os.path.lexists(path):  # else another drain has just removed it; a link to nothing stays
                self.unread.add(path)
                self.refuse(path, f"{path} is not a ring that can be read, and stays where it is: {error}")
            return
        source.lapped_before = cursor.lapped
        try:
            is_taken = self._is_taken(source, state, changed)
        except OSError as error:
            self.wait_for(path, error)
            is_taken = False
        if not is_taken:
            source.close()
            return
        self.unread.discard(path)
        yield source, cursor

    def _is_taken(self, source: RingSource, state: Path, version: tuple[int, int]) -> bool:
        """Return whether *source* is ours to read from now on, where its cursor, *state*, still is of *version*."""
        if not self._is_ours(source):
            if source.names.home or self._serving.orphans_only:
                self.refused[source.path] = ""  # another drain's; the names of a new ring may still be on their way
            return False
        # Else another drain reads it, as long as it lives, or has done so since we looked.
        return bool(self.own) or (take_for_reading(source.fd) and source.path.exists() and version_of(state) == version)

    def wait_for(self, path: Path, error: Exception) -> None:
        """Say that the ring at *path*, or the folder, cannot be read for now: what is wrong may pass."""
        self.unread.add(path)
        again = "try it again" if self._serving.orphans_only else "it is tried again"
        guard.say(f"{path} cannot be read for now ({error}): {again}", f"{path} waits")

    def refuse(self, path: Path, why: str) -> None:
        """Leave the ring at *path* alone from now on, and say *why*."""
        self.refused[path] = why
        guard.say(why)

    def _is_ours(self, source: RingSource) -> bool:
        home = str(source.names.home.get("drain", ""))
        if self._serving.home is not None and os.fstat(source.fd).st_uid != os.geteuid():
            return False  # it says where its run and files are to be written: another user's drain does that
        if self._serving.orphans_only:
            served = lock_is_held(self._serving.rings / f"{ALL_RINGS}.lock") or not self._stand_in_for(home)
            return not served and not writer_is_alive(source.fd)
        return self._serving.home is None or home == self._serving.home

    def _stand_in_for(self, home: str) -> bool:
        """Keep the drain *home* from being started while its rings are recovered: two would write the same files."""
        lock = self._serving.rings / f"{home}.lock"
        if home and home not in self._locks and is_ours_to_take(lock):
            fd = take_lock(lock)
            if fd is None:
                return False
            self._locks[home] = fd
        return True

    def remove_unborn(self) -> None:
        """Remove rings whose writer was killed while it made them; they never held a record."""
        for path in self._serving.rings.glob(".*.new"):
            try:
                with os.fdopen(open_for_reading(path), "rb") as file:
                    if time.time() - os.fstat(file.fileno()).st_mtime > UNBORN_S and not writer_is_alive(file.fileno()):
                        path.unlink(missing_ok=True)
            except OSError:
                continue  # it got its name, or another drain was faster

    def remove_old_logs(self) -> None:
        """Remove what drains that ended long ago complained of, and what those left that were killed: nobody else does.

        Each configuration and job has its own.
        """
        for path in self._serving.rings.glob("*.log"):
            try:
                lock, is_old = path.with_suffix(".lock"), time.time() - path.stat().st_mtime > LOG_S
                if is_old and is_ours_to_take(lock):
                    _remove_unheld(lock)
            except OSError:
                continue  # another user's, or another drain was faster

    def close(self) -> None:
        """Let other drains be started again; of those that were killed nothing stays but what they complained of."""
        for home, fd in self._locks.items():
            lock = self._serving.rings / f"{home}.lock"
            for kind in (".bell", ".log", ".lock"):
                with suppress(OSError):  # there is none, or another drain was faster; what stays means nothing
                    left = lock.with_suffix(kind)
                    if kind != ".log" or not left.stat().st_size:
                        left.unlink()
            os.close(fd)


def _remove_unheld(lock: Path) -> None:
    """Remove a drain's files unless it is at work; meanwhile none is started, which would have the same names."""
    fd = take_lock(lock)
    if fd is not None:
        for kind in (".bell", ".log", ".lock"):
            lock.with_suffix(kind).unlink(missing_ok=True)
        os.close(fd)


def _rings_in(folder: Path) -> set[Path]:
    names = os.listdir(folder)  # noqa: PTH208  -- asked for at every turn, and `glob` takes ten times as long
    return {_ring_path(folder, name) for name in names if name.endswith(".ring")}


@lru_cache(maxsize=1024)
def _ring_path(folder: Path, name: str) -> Path:
    return folder / name
