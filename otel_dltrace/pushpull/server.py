"""The gRPC server around a `Store`: one event loop, so that the store needs no lock and a waiting pull no thread."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull import trace
from otel_dltrace.pushpull.compression import pack_sum, unpack
from otel_dltrace.pushpull.contact import error_of, greet
from otel_dltrace.pushpull.errors import MismatchError, PeerLateError, PeerLostError, shown
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.store import Store
from otel_dltrace.pushpull.transport import (
    AUTHORIZATION,
    SERVICE,
    WELCOME,
    channel_options,
    credential,
    is_ours,
    method,
    open_channel,
    pack_json,
    server_credentials,
    unpack_json,
)
from otel_dltrace.pushpull.wire import Request, decode

T = TypeVar("T")
_LAST_WORDS_S = 10.0
"""How long workers may take to be told why the job ends."""
Context = Any
"""``grpc.aio.ServicerContext``, which is generic over messages; ours are bytes."""
Metadata = Mapping[str, Any]
Call = Callable[[bytes, Metadata], Awaitable[bytes]]


class Server:
    """One server of a job; server 0 also knows where the others are."""

    def __init__(self, layout: Layout, options: Options) -> None:
        if not options.token:
            raise ConfigError("PUSHPULL_TOKEN is not set: a server has to know its job's secret")
        self.options = options
        self.num_servers = max(1, layout.num_servers)
        self.store = Store(layout.num_workers, self.num_servers)
        self.addresses: dict[int, str] = {}
        self.changed = asyncio.Condition()
        self._sessions: dict[int, str] = {}
        self._sums: dict[tuple[int, int], asyncio.Event] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the methods, each behind the check of the token."""
        unary = {
            "Hello": self._hello,
            "Register": self._register,
            "Servers": self._servers,
            "Leave": self._leave,
            "Initialize": self._initialize,
            "Push": self._push,
            "Pull": self._pull,
        }
        table = {name: grpc.unary_unary_rpc_method_handler(self._guarded(call)) for name, call in unary.items()}
        table["Session"] = grpc.unary_stream_rpc_method_handler(self._session)
        return grpc.method_handlers_generic_handler(SERVICE, table)

    async def deserted(self) -> None:
        """Return when all workers have come and gone; one that has not come to a failed job is given the timeout."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.store.deserted or bool(self.store.failure))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait_for(lambda: self.store.deserted), self.options.timeout_s)

    def _guarded(self, call: Call) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(body: bytes, context: Context) -> bytes:
            metadata = await self._check_caller(context)
            try:
                return await call(body, metadata)
            except PeerLateError as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            except PeerLostError as error:
                await context.abort(grpc.StatusCode.ABORTED, str(error))
            except (MismatchError, ValueError, KeyError, TypeError) as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort has raised")

        return answer

    async def _check_caller(self, context: Context) -> Metadata:
        """Return what came along with a request of our job, but for the token; gRPC makes it anew at each asking."""
        metadata = dict(context.invocation_metadata() or ())
        if not is_ours(metadata.pop(AUTHORIZATION, ""), self.options):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this job's")
        return metadata

    async def _hello(self, _body: bytes, _metadata: Metadata) -> bytes:
        return b""

    async def _register(self, body: bytes, _metadata: Metadata) -> bytes:
        fields = unpack_json(body, server=int, address=str)
        if not 0 <= fields["server"] < self.num_servers:
            raise MismatchError(f"server {fields['server']} came, server 0's job has {self.num_servers}")
        async with self.changed:
            self.store.check_job()  # no worker would ever come to a server that is too late
            self.addresses[fields["server"]] = fields["address"]
            self.changed.notify_all()
        return b""

    async def _servers(self, _body: bytes, _metadata: Metadata) -> bytes:
        """Say where all servers are, once they have come; a worker that waits for one in vain ends the job.

        One that comes after a failure is told of it by its session, which the job waits for.
        """
        async with self.changed:
            told = self.changed.wait_for(lambda: not self._absent() or bool(self.store.failure))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(told, self.options.timeout_s)
            if absent := self._absent():
                who = ", ".join(map(str, absent))
                self.store.fail(f"server {who} did not come to server 0 within {self.options.timeout_s:g} s")
                self.changed.notify_all()
                self.store.check_job()
        return pack_json(addresses=[self.addresses[number] for number in sorted(self.addresses)])

    def _absent(self) -> list[int]:
        return sorted(set(range(self.num_servers)) - self.addresses.keys())

    async def _leave(self, body: bytes, _metadata: Metadata) -> bytes:
        fields = unpack_json(body, worker=int, session=str, reason=str)
        worker = fields["worker"]
        # One that was refused ends no job that is under way, be it its worker's namesake.
        if self._sessions.get(worker) == fields["session"] or not self.store.complete:
            await self._let_go(worker, fields["reason"])
        return b""

    async def _session(self, body: bytes, context: Context) -> AsyncIterator[bytes]:
        """Last as long as the worker does; its end without a word from the worker is the worker's death."""
        await self._check_caller(context)
        try:
            fields = unpack_json(body, worker=int, session=str, num_workers=int, agreed=dict)
        except MismatchError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        worker = fields["worker"]
        try:
            self.store.join(worker, fields["num_workers"], fields["agreed"])
        except MismatchError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        self._sessions[worker] = fields["session"]
        try:
            await self._until(lambda: self.store.complete)
            if not self.store.failure:
                yield WELCOME
            await self._until(lambda: worker in self.store.left)
            if self.store.failure:
                yield self.store.failure.encode()
        finally:
            # In its own task: the one we are in may be cancelled, and the condition has to be taken.
            silent = f"its connection closed; it died, was killed, or did not answer for {self.options.timeout_s:g} s"
            lost = asyncio.ensure_future(self._let_go(worker, silent))
            await asyncio.shield(lost)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            self.changed.notify_all()
            await self.changed.wait_for(lambda: condition() or bool(self.store.failure))

    async def _let_go(self, worker: int, reason: str) -> None:
        async with self.changed:
            self.store.leave(worker, reason)
            self.changed.notify_all()
        for event in self._sums.values():
            event.set()

    async def _initialize(self, body: bytes, _metadata: Metadata) -> bytes:
        request, payload = decode(body)
        self.store.initialize(request, unpack(request, payload))
        return b""

    async def _push(self, body: bytes, metadata: Metadata) -> bytes:
        request, payload = decode(body)
        observer, followed = trace.observer, None
        if observer is not None:
            followed = observer.request_started("push", request, metadata, time.monotonic_ns())
        error = None
        try:
            if self.store.push(request, unpack(request, payload)):
                self._wake(request)
        except (PeerLostError, MismatchError) as failure:
            error = failure
            raise
        finally:
            if followed is not None:
                followed.finished(0, 0, time.monotonic_ns(), error)
        return b""

    async def _pull(self, body: bytes, metadata: Metadata) -> bytes:
        request, _ = decode(body)
        arrived, waited, answer, error = time.monotonic_ns(), 0, b"", None
        observer, followed = trace.observer, None
        if observer is not None:
            followed = observer.request_started("pull", request, metadata, arrived)
        try:
            try:
                packing, total = await self._sum(request)
            finally:  # also of what it waited for in vain
                waited = time.monotonic_ns() - arrived
            answer = bytes([packing]) + pack_sum(packing, total)
        except (PeerLostError, MismatchError) as failure:
            error = failure
            raise
        except asyncio.CancelledError:
            error = PeerLostError(f"worker {request.worker} has gone or given up, or the server was ended")
            raise
        finally:
            if followed is not None:
                followed.finished(len(answer), waited, time.monotonic_ns(), error)
        return answer

    async def _sum(self, request: Request) -> tuple[int, Any]:
        """Return what *request* pulls, once all workers have pushed it."""
        end = time.monotonic() + self.options.timeout_s
        while (found := self.store.pull(request)) is None:
            event = self._sums.setdefault((request.key, request.round), asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), end - time.monotonic())
            except asyncio.TimeoutError:
                absent = ", ".join(map(str, self.store.missing(request)))
                raise PeerLateError(
                    f"no push from worker {absent} within {self.options.timeout_s:g} s: round {request.round} of "
                    f"{shown(request.name)} (key {request.key})"
                ) from None
            if not self.store.failure and self.store.missing(request):
                event.clear()  # somebody left who had pushed: the others are still waited for
        return found

    def _wake(self, request: Request) -> None:
        """Let the pulls go on that wait for what *request* completed."""
        if event := self._sums.pop((request.key, request.round), None):
            event.set()


def serve(layout: Layout, options: Options) -> None:
    """Serve one job until its workers are gone, in whichever way, or a signal ends it."""
    asyncio.run(_serve(layout, options))


async def _serve(layout: Layout, options: Options) -> None:
    server = Server(layout, options)
    # Of two servers at one port each would get some of the other job's workers.
    listener = grpc.aio.server(options=[*channel_options(options), ("grpc.so_reuseport", 0)])
    listener.add_generic_rpc_handlers((server.handlers(),))
    port = _bind(listener, options)
    await listener.start()
    try:
        _tell_address(server, f"{options.host}:{port}", options)
    except PeerLostError:
        await listener.stop(grace=None)  # or gRPC says that its loop is closed
        raise
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    waiting = {asyncio.ensure_future(server.deserted()), asyncio.ensure_future(ended.wait())}
    _, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await listener.stop(grace=1.0 if ended.is_set() else _LAST_WORDS_S)


def _bind(listener: Any, options: Options) -> int:
    """Listen: server 0 at the job's root port, the others wherever there is room."""
    wanted = f"{options.host}:{options.root.rpartition(':')[2] if options.server == 0 else 0}"
    try:
        if options.tls is None:
            return int(listener.add_insecure_port(wanted))
        return int(listener.add_secure_port(wanted, server_credentials(options.tls)))
    except RuntimeError:
        cause = ", or PUSHPULL_TLS_* not right" if options.tls else ""
        raise ConfigError(f"server {options.server} cannot listen at {wanted}; is the port taken{cause}?") from None


def _tell_address(server: Server, address: str, options: Options) -> None:
    if options.server == 0:
        server.addresses[0] = address
        return
    body = pack_json(server=options.server, address=address)
    where = f"server 0 at {options.root}"
    with open_channel(options.root, options) as channel:
        greet(channel, where, options)
        try:
            channel.unary_unary(method("Register"))(body, metadata=(credential(options),), timeout=options.timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, where) from None
