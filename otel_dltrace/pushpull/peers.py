"""The local ranks of one worker: each has a Unix socket to each other, and the end of a socket is a death."""

import os
import selectors
import socket
import stat
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull.errors import PeerLostError, PushPullError
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.stages import Signal

_MESSAGE = struct.Struct("<BxxxIQ")
_HELLO = struct.Struct("<I")
_SERVED, _FAILED, _BYE = 253, 254, 255
_LONGEST = 4096
_LONGEST_PATH = 107
"""Linux's unix(7): sun_path has 108 bytes, the last of which is 0."""
_RETRY_S = 0.02
_ROOT_WAITS = 3
"""How often the root waits for as long as anybody does: for server 0, for the others, and for all workers."""
_GOODBYE_S = 1.0
"""How long the other local ranks have to make room for the last word, all together: one of them may stand still."""


class Listener(Protocol):
    """Who is told what the other local ranks say, on the thread that reads their sockets."""

    def signalled(self, source: int, signal: Signal, key: int, mark: int) -> None:
        """Local rank *source* has sent *signal* for *key*, a tensor with the fingerprint *mark*."""

    def left(self, source: int) -> None:
        """Local rank *source* has said goodbye."""

    def fail(self, error: PushPullError) -> None:
        """The job cannot go on."""


class Peers:
    """Sockets to the other local ranks; with none there is nothing to do."""

    def __init__(self, layout: Layout, options: Options, listener: Listener) -> None:
        self.layout = layout
        self.options = options
        self.listener = listener
        self._sockets: dict[int, socket.socket] = {}
        self._served = threading.Event()
        self._closing = threading.Event()

    def open(self) -> None:
        """Connect all local ranks with each other: each calls those below it.

        Raises:
            PeerLostError: One of them did not come within the timeout.
            ConfigError: They cannot meet in that folder.
        """
        if self.layout.local_size == 1:
            return
        me = self.layout.local_rank
        path = self._socket(me)
        _check_length(self._socket(self.layout.local_size - 1))  # the longest: all ranks say so, or none
        make_private(self.options.folder)
        end = time.monotonic() + self.options.timeout_s
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
            waiting.bind(str(path))
            waiting.listen(self.layout.local_size)
            for rank in range(me):
                self._sockets[rank] = self._call(rank, end)
            while len(self._sockets) < self.layout.local_size - 1:
                self._accept(waiting, end)
        path.unlink(missing_ok=True)
        threading.Thread(target=self._read, name="pushpull-peers", daemon=True).start()

    def served(self) -> None:
        """Tell the other local ranks that we, the root, have met the servers, and with them all workers."""
        for sock in self._sockets.values():
            with suppress(OSError):  # as in `send`
                sock.send(bytes([_SERVED]))

    def wait_for_root(self) -> None:
        """Return when the root has met the servers, or the job has failed, which is told: the root says who is late.

        Raises:
            PeerLostError: The root stands still.
        """
        limit = _ROOT_WAITS * self.options.timeout_s
        if not self._served.wait(limit):
            raise PeerLostError(f"local rank {self.layout.root} did not meet the servers in {limit:g} s")

    def send(self, signal: Signal, key: int, mark: int, receivers: frozenset[int]) -> None:
        """Send *signal* to *receivers*."""
        for rank in receivers:
            # Whoever reads the socket finds out that it is broken, and says so.
            with suppress(OSError):
                self._sockets[rank].send(_MESSAGE.pack(signal, mark, key))

    def close(self, reason: str = "") -> None:
        """Say goodbye, or with a *reason* that the job cannot go on; who reads nothing is not told."""
        self._closing.set()
        self._served.set()
        message = bytes([_FAILED if reason else _BYE]) + reason.encode()[: _LONGEST - 1]
        end = time.monotonic() + _GOODBYE_S
        for sock in self._sockets.values():
            with suppress(OSError):
                sock.settimeout(max(0.0, end - time.monotonic()))
                sock.send(message)
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _socket(self, rank: int) -> Path:
        return self.options.folder / f"{rank}.sock"

    def _call(self, rank: int, end: float) -> socket.socket:
        path = self._socket(rank)
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(str(path))
                sock.send(_HELLO.pack(self.layout.local_rank) + self.options.token.encode())
            except OSError:  # not there yet, or left by a job before us
                sock.close()
                if time.monotonic() > end:
                    raise self._nobody([rank]) from None
                time.sleep(_RETRY_S)
            else:
                return sock

    def _accept(self, waiting: socket.socket, end: float) -> None:
        waiting.settimeout(max(0.01, end - time.monotonic()))
        try:
            sock, _ = waiting.accept()
            sock.settimeout(max(0.01, end - time.monotonic()))
            hello = sock.recv(_LONGEST)
        except TimeoutError:
            above = range(self.layout.local_rank + 1, self.layout.local_size)
            raise self._nobody([rank for rank in above if rank not in self._sockets]) from None
        if hello[_HELLO.size :] != self.options.token.encode():
            sock.close()
            return
        sock.settimeout(None)
        self._sockets[_HELLO.unpack_from(hello)[0]] = sock

    def _nobody(self, ranks: list[int]) -> PeerLostError:
        names = ", ".join(map(str, ranks))
        return PeerLostError(
            f"local rank {names} did not come to {self.options.folder} in {self.options.timeout_s:g} s"
        )

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._sockets.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._closing.is_set():
                for ready, _ in selector.select():
                    if not self._take(ready.fileobj, ready.data):  # type: ignore[arg-type]  # sockets alone are registered
                        selector.unregister(ready.fileobj)

    def _take(self, sock: socket.socket, rank: int) -> bool:
        """Take one message of *rank*; return whether more can come."""
        try:
            message = sock.recv(_LONGEST)
        except OSError:
            message = b""
        if self._closing.is_set():
            return False
        if not message:
            self.listener.fail(PeerLostError(f"local rank {rank} of worker {self.layout.worker} died or was killed"))
        elif message[0] < _SERVED:
            signal, mark, key = _MESSAGE.unpack(message)
            self.listener.signalled(rank, Signal(signal), key, mark)
            return True
        elif message[0] == _SERVED:
            self._served.set()
            return True
        elif message[0] == _FAILED:
            self.listener.fail(PeerLostError(message[1:].decode(errors="replace")))
        else:
            self.listener.left(rank)
        return False


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"{path} has {len(os.fsencode(path))} bytes, and a socket's path {_LONGEST_PATH} at most; "
            "set PUSHPULL_DIR to a shorter one, or where `pushpull launch` makes it TMPDIR"
        )


def make_private(folder: Path) -> None:
    """Make *folder* for us alone, or see that it is.

    Raises:
        ConfigError: It cannot be made, belongs to somebody else, or others may write there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; set PUSHPULL_DIR to one that can be") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a folder that only you can use; set PUSHPULL_DIR to one that is")
