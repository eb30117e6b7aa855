"""The process of one server: it listens, meets server 0, and ends with its job."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull.contact import error_of, greet
from otel_dltrace.pushpull.errors import MismatchError, PeerLostError, PushPullError
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.server import Server
from otel_dltrace.pushpull.transport import (
    WELCOME,
    channel_options,
    credential,
    method,
    open_channel,
    pack_json,
    server_credentials,
)

_LAST_WORDS_S = 10.0
"""How long workers may take to be told why the job ends."""
_ANY_ORDER_S = 1.0
"""Within what time whoever ends a job ends all its servers: one that misses server 0 for longer was forgotten."""

_Lost = asyncio.Queue[PushPullError]
"""Of server 0: why it is not there for us any more, once."""
_Welcome = Future[None]
"""Done when server 0 knows us; fails with why it does not."""


def serve(layout: Layout, options: Options) -> None:
    """Serve one job until its workers are gone, in whichever way, or a signal ends it.

    Raises:
        ConfigError: It cannot listen.
        PeerLostError: Server 0 cannot be reached, or has gone before any worker came: none will.
        MismatchError: Server 0 knows no such server, or another one of that number has come to it.
    """
    asyncio.run(_serve(layout, options))


async def _serve(layout: Layout, options: Options) -> None:
    server = Server(layout, options)
    # Of two servers at one port each would get some of the other job's workers.
    listener = grpc.aio.server(options=[*channel_options(options), ("grpc.so_reuseport", 0)])
    listener.add_generic_rpc_handlers((server.handlers(),))
    address = f"{options.host}:{_bind(listener, options)}"
    await listener.start()
    grace = _LAST_WORDS_S
    try:
        with _registered(server, address, options) as lost:
            if await _wait_for_end(server, lost):
                grace = 1.0
    except PeerLostError:
        if options.bereft is not None:
            options.bereft.touch()
        raise
    finally:  # whoever still asks is let go in order; or gRPC says that its loop is closed
        await server.end()
        await listener.stop(grace)


async def _wait_for_end(server: Server, lost: _Lost) -> bool:
    """Return, when there is nobody more to serve, whether a signal has ended the job.

    Raises:
        PushPullError: Nobody will come, since server 0 is *lost*.
    """
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    ways = [asyncio.ensure_future(way) for way in (server.deserted(), ended.wait(), _bereft(server, lost))]
    done, others = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    if not ended.is_set():
        for task in done:
            task.result()
    return ended.is_set()


async def _bereft(server: Server, lost: _Lost) -> None:
    """Raise once server 0 is *lost*, unless workers have come: they know by themselves how their job goes on."""
    error = await lost.get()
    await asyncio.sleep(_ANY_ORDER_S)
    if not (server.store.joined or server.store.failure):
        raise error
    await asyncio.get_running_loop().create_future()  # never done


def _bind(listener: Any, options: Options) -> int:
    """Listen: server 0 at the job's root port, the others wherever there is room."""
    wanted = f"{options.host}:{options.root.rpartition(':')[2] if options.server == 0 else 0}"
    try:
        if options.tls is None:
            return int(listener.add_insecure_port(wanted))
        return int(listener.add_secure_port(wanted, server_credentials(options.tls)))
    except RuntimeError:
        causes = [f"{options.host} (DMLC_NODE_HOST) not an address of this host"]
        if options.server == 0:  # the others take any port that is free
            causes.insert(0, "the port taken")
        if options.tls is not None:
            causes.append("PUSHPULL_TLS_* not right")
        raise ConfigError(f"server {options.server} cannot listen at {wanted}; is {', or '.join(causes)}?") from None


@contextmanager
def _registered(server: Server, address: str, options: Options) -> Iterator[_Lost]:
    """Have server 0 know where *server* is, while this lasts; yield where it is said that server 0 has gone."""
    lost = _Lost()
    if options.server == 0:
        server.addresses[0] = address
        yield lost
        return
    where = f"server 0 at {options.root}"
    with open_channel(options.root, options) as channel:
        greet(channel, where, options)
        body = pack_json(server=options.server, address=address)
        call = channel.unary_stream(method("Register"))(body, metadata=(credential(options),))
        welcome = _Welcome()
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=_listen, args=(call, where, welcome, loop, lost), name="pushpull-registered", daemon=True
        ).start()
        try:
            welcome.result(options.timeout_s)
        except FutureTimeoutError:
            raise PeerLostError(f"{where} did not answer in time; set PUSHPULL_TIMEOUT higher?") from None
        yield lost


def _listen(call: Any, where: str, welcome: _Welcome, loop: asyncio.AbstractEventLoop, lost: _Lost) -> None:
    """Wait for server 0, which is *where*, to say that we are known, and then for its end."""
    error: PushPullError = PeerLostError(f"{where} ended before any worker came here")
    try:
        if next(call) == WELCOME:
            welcome.set_result(None)
            for _ in call:  # nothing more, but the end
                pass
        else:
            error = MismatchError(f"{where} is from another release")
    except grpc.RpcError as broken:
        error = error_of(broken, where)
    except StopIteration:
        pass
    if not welcome.done():
        welcome.set_exception(error)
    with suppress(RuntimeError):  # the loop is closed: it was we who went
        loop.call_soon_threadsafe(lost.put_nowait, error)
