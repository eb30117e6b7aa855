"""A worker's side of the wire: it finds the servers, keeps a session with each, and pushes and pulls."""

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc

from otel_dltrace.pushpull.contact import error_of, greet
from otel_dltrace.pushpull.errors import PeerLateError, PeerLostError, PushPullError
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options, agreed
from otel_dltrace.pushpull.transport import WELCOME, credential, method, open_channel, pack_json, unpack_json
from otel_dltrace.pushpull.wire import Request, encode

Done = Callable[[bytes, PushPullError | None], None]
"""Called on a thread of gRPC's with the answer, or with why there is none."""

_AFTER_THE_SERVER_S = 5.0
_LEAVING_S = 4.0
_LAST_WORD_S = 1.0
"""How long the session with a server that is going has to say why."""
_ASKED_S = 2.0
"""How long the other servers have to say that they are there, once a worker was waited for in vain."""
_GOING = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


class Servers:
    """The servers of the job, as the root of one worker sees them."""

    def __init__(self, layout: Layout, options: Options, failed: Callable[[PushPullError], None]) -> None:
        self.layout = layout
        self.options = options
        self.addresses: list[str] = []
        self._failed = failed
        self._session = secrets.token_hex(8)
        self._channels: list[grpc.Channel] = []
        self._pushes: list[grpc.UnaryUnaryMultiCallable] = []
        self._pulls: list[grpc.UnaryUnaryMultiCallable] = []
        self._closing = self._ending = False

    def open(self) -> None:
        """Connect to all servers; return when all workers have done so, or when the job has failed, which is told.

        Raises:
            PeerLostError: Not all are there within the timeout, or one does not trust us.
            MismatchError: The first one is of another release.
        """
        with open_channel(self.options.root, self.options) as channel:
            greet(channel, f"the server at {self.options.root}", self.options)
            said = self._call(channel, self.options.root, "Servers", b"")
            self.addresses = list(unpack_json(said, addresses=list)["addresses"])
        welcomes = []
        for number, address in enumerate(self.addresses):
            channel = open_channel(address, self.options)
            self._channels.append(channel)
            self._pushes.append(channel.unary_unary(method("Push")))
            self._pulls.append(channel.unary_unary(method("Pull")))
            greet(channel, self._where(number), self.options, lambda: self._closing)
            if self._closing:
                channel.close()  # `close` may have come before it
                return
            welcomes.append(self._open_session(number, channel))
        for number, welcome in enumerate(welcomes):
            if not welcome.wait(self.options.timeout_s):
                raise PeerLostError(f"not all workers came to {self._where(number)} in {self.options.timeout_s:g} s")

    def push(
        self, server: int, request: Request, payload: bytes | memoryview, extra: Mapping[str, str], done: Done
    ) -> None:
        """Send a partition; *done* is called when the server has it."""
        self._start(self._pushes[server], server, encode(request, payload), extra, done)

    def pull(self, server: int, request: Request, extra: Mapping[str, str], done: Done) -> None:
        """Ask for a partition; *done* is called with it when all workers have pushed theirs."""
        self._start(self._pulls[server], server, encode(request), extra, done)

    def initialize(self, server: int, request: Request, payload: memoryview) -> None:
        """Give an asynchronous key its first value, if it has none."""
        self._call(self._channels[server], self.addresses[server], "Initialize", encode(request, payload))

    def close(self, reason: str = "") -> None:
        """Say goodbye, with a *reason* if the job cannot go on without us; never raise."""
        self._closing = True
        body = pack_json(worker=self.layout.worker, session=self._session, reason=reason)
        leaving = []
        for channel in self._channels:
            with suppress(ValueError):  # closed by `open`, which may be under way on another thread
                leaving.append(self._small(channel, "Leave", body, _LEAVING_S))
        for call in leaving:
            call.exception()
        for channel in self._channels:
            channel.close()

    def _call(self, channel: grpc.Channel, address: str, name: str, body: bytes) -> bytes:
        """Return the answer to one of the small calls."""
        call = channel.unary_unary(method(name))
        metadata, limit = (credential(self.options),), self.options.timeout_s + _AFTER_THE_SERVER_S
        try:
            return bytes(call(body, metadata=metadata, timeout=limit, wait_for_ready=True))
        except grpc.RpcError as error:
            raise error_of(error, f"the server at {address}") from None

    def _small(self, channel: grpc.Channel, name: str, body: bytes, seconds: float) -> grpc.Future:
        """Begin one of the small calls, for which nobody waits longer than *seconds*."""
        return channel.unary_unary(method(name)).future(body, metadata=(credential(self.options),), timeout=seconds)

    def _start(
        self, call: grpc.UnaryUnaryMultiCallable, server: int, body: bytes, extra: Mapping[str, str], done: Done
    ) -> None:
        metadata = (credential(self.options), *extra.items())
        future = call.future(body, metadata=metadata, timeout=self.options.timeout_s + _AFTER_THE_SERVER_S)
        future.add_done_callback(lambda ended: self._finish(ended, server, done))

    def _finish(self, ended: grpc.Future, server: int, done: Done) -> None:
        if self._closing:
            return
        error = ended.exception()
        if error is None:
            done(ended.result(), None)
            return
        said = error_of(error, self._where(server))
        if ended.code() in _GOING:
            self._end_after(_LAST_WORD_S, self._failed, said)
        elif isinstance(said, PeerLateError):
            self._end_after(0, self._fail_late, said, server)
        else:
            done(b"", said)

    def _end_after(self, seconds: float, fail: Callable[..., None], *why: Any) -> None:
        """Have *fail* say why, unless a session has done so before; not waited for here, on a thread of gRPC's."""
        if self._ending:
            return
        self._ending = True
        later = threading.Timer(seconds, fail, why)
        later.daemon = True
        later.start()

    def _fail_late(self, said: PeerLateError, server: int) -> None:
        """Fail with what *server* said of who is late, after the servers that stand still: it may wait for those.

        It has as long to find that out as others have to wait for it, and so nobody but us would name them.
        """
        asked: dict[str, grpc.Future] = {}
        with suppress(ValueError):  # closed in the meantime: the job has failed otherwise
            for number, channel in enumerate(self._channels):
                if number != server:
                    asked[self._where(number)] = self._small(channel, "Hello", b"", _ASKED_S)
        silent = [where for where, call in asked.items() if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED]
        stands_still = f"{', '.join(silent)}: no answer within {_ASKED_S:g} s; " if silent else ""
        self._failed(PeerLateError(f"{stands_still}{said}"))

    def _open_session(self, number: int, channel: grpc.Channel) -> threading.Event:
        welcome = threading.Event()
        body = pack_json(
            worker=self.layout.worker,
            session=self._session,
            num_workers=self.layout.num_workers,
            agreed=agreed(self.layout, self.options),
        )
        metadata = (credential(self.options),)
        session = channel.unary_stream(method("Session"))(body, metadata=metadata, wait_for_ready=True)
        threading.Thread(
            target=self._listen, args=(number, session, welcome), name=f"pushpull-session-{number}", daemon=True
        ).start()
        return welcome

    def _listen(self, number: int, session: grpc.Call, welcome: threading.Event) -> None:
        """Wait for what the server has to say: all are there; the job cannot go on; or nothing more at all."""
        said: PushPullError = PeerLostError(f"{self._where(number)} closed the session")
        try:
            for message in session:
                if message == WELCOME:
                    welcome.set()
                else:
                    said = PeerLostError(bytes(message).decode(errors="replace"))
        except grpc.RpcError as error:
            said = error_of(error, self._where(number))
        if not self._closing:
            self._failed(said)
        welcome.set()

    def _where(self, number: int) -> str:
        return f"server {number} at {self.addresses[number]}"
