"""The gRPC server around a `Store`: one event loop, so that the store needs no lock and a waiting pull no thread."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull import trace
from otel_dltrace.pushpull.compression import pack_sum, unpack
from otel_dltrace.pushpull.errors import MismatchError, PeerLateError, PeerLostError, shown
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.store import Store
from otel_dltrace.pushpull.transport import AUTHORIZATION, SERVICE, WELCOME, is_ours, pack_json, unpack_json
from otel_dltrace.pushpull.wire import Request, decode

Context = Any
"""``grpc.aio.ServicerContext``, which is generic over messages; ours are bytes."""
Metadata = Mapping[str, Any]
Call = Callable[[bytes, Metadata], Awaitable[bytes]]
_CODES: dict[type[Exception], grpc.StatusCode] = {
    PeerLateError: grpc.StatusCode.NOT_FOUND,
    PeerLostError: grpc.StatusCode.ABORTED,
}
"""By which code a caller knows what it is told; of all else it is that the request is wrong."""


class Server:
    """One server of a job; server 0 also knows where the others are."""

    def __init__(self, layout: Layout, options: Options) -> None:
        if not options.token:
            raise ConfigError("PUSHPULL_TOKEN is not set: a server needs to know its job's secret")
        self.options = options
        self.num_servers = max(1, layout.num_servers)
        self.store = Store(layout.num_workers, self.num_servers)
        self.addresses: dict[int, str] = {}
        self.changed = asyncio.Condition()
        self.is_ending = False
        """Whether nobody is served any more."""
        self._registered: dict[int, Context] = {}
        """The latest call of each other server."""
        self._sessions: dict[int, str] = {}
        self._sums: dict[tuple[int, int], asyncio.Event] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the methods, each behind the check of the token."""
        unary = {
            "Hello": self._hello,
            "Servers": self._servers,
            "Leave": self._leave,
            "Initialize": self._initialize,
            "Push": self._push,
            "Pull": self._pull,
        }
        table = {name: grpc.unary_unary_rpc_method_handler(self._guarded(call)) for name, call in unary.items()}
        table["Session"] = grpc.unary_stream_rpc_method_handler(self._session)
        table["Register"] = grpc.unary_stream_rpc_method_handler(self._register)
        return grpc.method_handlers_generic_handler(SERVICE, table)

    async def deserted(self) -> None:
        """Return when all workers have come and gone; one that has not come to a failed job is given the timeout."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.store.deserted or bool(self.store.failure))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait_for(lambda: self.store.deserted), self.options.timeout_s)

    async def end(self) -> None:
        """Let go of the other servers."""
        async with self.changed:
            self.is_ending = True
            self.changed.notify_all()

    def _guarded(self, call: Call) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(body: bytes, context: Context) -> bytes:
            metadata = await self._check_caller(context)
            try:
                return await call(body, metadata)
            except (PeerLostError, MismatchError, ValueError, KeyError, TypeError) as error:
                await _refuse(context, error)

        return answer

    async def _check_caller(self, context: Context) -> Metadata:
        """Return what came along with a request of our job, but for the token; gRPC makes it anew at each asking."""
        metadata = dict(context.invocation_metadata() or ())
        if not is_ours(metadata.pop(AUTHORIZATION, ""), self.options):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this job's")
        return metadata

    async def _hello(self, _body: bytes, _metadata: Metadata) -> bytes:
        return b""

    async def _register(self, body: bytes, context: Context) -> AsyncIterator[bytes]:
        """Last as long as the caller does, another server, so that each knows of the other's end.

        One that goes before workers come makes room for the next of its number, and so does one that is silent.
        """
        await self._check_caller(context)
        try:
            fields = unpack_json(body, server=int, address=str)
            number = self._allowed(fields["server"])
        except (PeerLostError, MismatchError) as error:
            await _refuse(context, error)
        self.addresses[number], self._registered[number] = fields["address"], context
        try:
            yield WELCOME
            async with self.changed:
                self.changed.notify_all()  # not before it knows that it is known
                await self.changed.wait_for(lambda: self.is_ending or self._registered[number] is not context)
        finally:
            is_latest = self._registered[number] is context
            if is_latest and not self.store.joined:
                del self.addresses[number]
        if not is_latest:
            another = f"another server {number} has come, at {self.addresses.get(number)}"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{another}; does each have its own DMLC_SERVER_ID?"
            )
        if self.store.failure:
            await context.abort(grpc.StatusCode.ABORTED, self.store.failure)

    def _allowed(self, number: int) -> int:
        """Return *number* if a server of that number may come, or come again."""
        if not 0 < number < self.num_servers:
            raise MismatchError(f"server {number} came, but server 0's job has {self.num_servers}")
        self.store.check_job()  # no worker would ever come to it
        if self.store.joined:
            raise MismatchError(f"server {number} came after the workers, which know another address for it")
        return number

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
            await _refuse(context, error)
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
        observer, error = trace.observer, None
        arrived = 0 if observer is None else time.monotonic_ns()
        try:
            if self.store.push(request, unpack(request, payload)):
                self._wake(request)
        except (PeerLostError, MismatchError) as failure:
            error = failure
            raise
        finally:
            if observer is not None:
                observer.request_answered("push", request, metadata, arrived, 0, time.monotonic_ns(), error)
        return b""

    async def _pull(self, body: bytes, metadata: Metadata) -> bytes:
        request, _ = decode(body)
        observer, error = trace.observer, None
        arrived, waited = time.monotonic_ns(), 0
        try:
            try:
                packing, total = await self._sum(request)
            finally:  # also of what it waited for in vain
                waited = time.monotonic_ns() - arrived
            return bytes([packing]) + pack_sum(packing, total)
        except (PeerLostError, MismatchError) as failure:
            error = failure
            raise
        except asyncio.CancelledError:
            error = PeerLostError(f"worker {request.worker} has gone or given up, or the server was ended")
            raise
        finally:
            if observer is not None:
                observer.request_answered("pull", request, metadata, arrived, waited, time.monotonic_ns(), error)

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


async def _refuse(context: Context, error: Exception) -> NoReturn:
    """Tell the caller that its request ends with *error*, which `contact` makes an error of ours again."""
    await context.abort(_CODES.get(type(error), grpc.StatusCode.INVALID_ARGUMENT), str(error))
    raise AssertionError("abort has raised")
