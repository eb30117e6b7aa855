"""What both ends of the wire share: the methods' names, the channel's options, the token, TLS."""

import hmac
import json
from pathlib import Path
from typing import Any, Final

import grpc

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull.errors import MismatchError
from otel_dltrace.pushpull.options import Options, Tls

SERVICE: Final = "dltrace.pushpull.Store"
AUTHORIZATION: Final = "authorization"
WELCOME: Final = b"welcome"
"""What a session says once all workers are there; all it says later is why the job cannot go on."""
_ROOM_FOR_HEAD = 1 << 20
_NO_LIMIT = (1 << 31) - 1


def method(name: str) -> str:
    """Return the path of a method of ours."""
    return f"/{SERVICE}/{name}"


def channel_options(options: Options) -> list[tuple[str, int]]:
    """Return what client and server set alike: room for one partition, and finding out that the other is gone."""
    limit = 2 * options.partition_bytes + _ROOM_FOR_HEAD  # a sparse sum may be twice as long as a dense one
    wait = int(min(options.timeout_s * 1000, _NO_LIMIT))
    ping = min(max(wait // 4, 1000), 20_000)
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", ping),
        # A process may stand still in a debugger, or its network for a while; gRPC has a minute for each ping besides.
        ("grpc.keepalive_timeout_ms", wait),
        ("grpc.http2.ping_timeout_ms", wait),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.enable_http_proxy", 0),
        # All partitions of a large model may come at once; gRPC would cancel some over a thousand.
        ("grpc.server.max_pending_requests", _NO_LIMIT),
        ("grpc.server.max_pending_requests_hard_limit", _NO_LIMIT),
        # Servers come up in no order: a second between attempts would be most of a small job's start.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def credential(options: Options) -> tuple[str, str]:
    """Return the metadata that proves who belongs to the job."""
    return (AUTHORIZATION, f"Bearer {options.token}")


def is_ours(given: str | bytes, options: Options) -> bool:
    """Return whether the metadata *given* as `AUTHORIZATION` is the job's token."""
    expected = credential(options)[1].encode()
    return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), expected)


def open_channel(address: str, options: Options) -> grpc.Channel:
    """Return a channel to *address*; it connects by itself."""
    if options.tls is None:
        return grpc.insecure_channel(address, channel_options(options))
    return grpc.secure_channel(address, client_credentials(options.tls), channel_options(options))


def client_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return what a caller shows a server, and asks of it."""
    key, certificate = _read("KEY", tls.key), _read("CERT", tls.certificate)
    return grpc.ssl_channel_credentials(_read("CA", tls.ca), key, certificate)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return what a server shows its callers, and asks of them."""
    if tls.certificate is None:
        raise ConfigError("PUSHPULL_TLS_CERT is not set: a server over TLS shows a certificate")
    pair = (_read("KEY", tls.key), _read("CERT", tls.certificate))
    return grpc.ssl_server_credentials([pair], _read("CA", tls.ca), require_client_auth=tls.ca is not None)


def _read(what: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"PUSHPULL_TLS_{what}={path} cannot be read: {error.strerror}") from None
    if not content.strip():  # of an empty key gRPC ends the process
        raise ConfigError(f"PUSHPULL_TLS_{what}={path} is empty; it must be in PEM format")
    return content


def pack_json(**fields: Any) -> bytes:
    """Return *fields* as the body of one of the small calls."""
    return json.dumps(fields).encode()


def unpack_json(body: bytes, **kinds: type) -> dict[str, Any]:
    """Return the fields of one of the small calls, which has to have those in *kinds*, of these types.

    Raises:
        MismatchError: It is none.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or any(type(fields.get(name)) is not kind for name, kind in kinds.items()):
        wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise MismatchError(f"{body[:40]!r} is not a JSON object with {wanted}; do all run the same release?")
    return fields
