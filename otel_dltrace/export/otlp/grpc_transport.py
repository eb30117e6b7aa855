"""OTLP over gRPC: one attempt, and what the status and its details say of it."""

import re
import socket
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from otel_dltrace.export.choice import METRICS, TRACES
from otel_dltrace.export.otlp.outcome import USER_AGENT, Outcome, Verdict, accepted, bounded, brief
from otel_dltrace.export.otlp.settings import OtlpSettings

_METHODS = {
    TRACES: "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    METRICS: "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
_RETRYABLE = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
_KEEPALIVE = (
    # A host that is gone says nothing, and the kernel sends to it again for a quarter of an hour. With a keepalive gRPC
    # tells it to give up (TCP_USER_TIMEOUT) once what was sent has not been acknowledged for so long.
    ("grpc.keepalive_timeout_ms", 20_000),
    # Pings, for what acknowledges and passes nothing on; more often than every 5 min they are an offence by default.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_permit_without_calls", 0),
)

_ADDRESS = re.compile(r"last error: \w+: (ipv[46]:\S+): ")
_REFUSED = "Connection refused"
_LOOK_S = 0.5


class GrpcTransport:
    """OTLP over gRPC, with the request's bytes passed through as they are."""

    def __init__(self, settings: OtlpSettings) -> None:
        import grpc

        self._rpc_error: type[Exception] = grpc.RpcError
        self._timeout_s = settings.timeout_s
        self._secrets = settings.secrets
        self._metadata = grpc_metadata(settings)
        options = [
            ("grpc.primary_user_agent", USER_AGENT),
            # The sender does the waiting; with grpcio's own limit of 2 min a restarted collector is noticed late.
            ("grpc.initial_reconnect_backoff_ms", 250),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.use_local_subchannel_pool", 1),
            *_KEEPALIVE,
        ]
        compression = grpc.Compression.Gzip if settings.gzip else grpc.Compression.NoCompression
        if settings.tls:
            self._channel = grpc.secure_channel(settings.endpoint, grpc_credentials(settings), options, compression)
        else:
            self._channel = grpc.insecure_channel(settings.endpoint, options, compression)
        self._addresses = _Addresses()
        self._export = self._channel.unary_unary(
            _METHODS[settings.signal], response_deserializer=ExportTraceServiceResponse.FromString
        )

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Make one attempt to send *body*."""
        timeout = min(deadline_s, self._timeout_s)
        try:
            response = self._export(body, timeout=timeout, metadata=self._metadata)
        except self._rpc_error as error:
            return self._addresses.telling(_failure(error, self._secrets))
        self._addresses = _Addresses()
        return accepted(response, self._secrets)

    def close(self) -> None:
        """Close the channel; an attempt under way is cancelled."""
        self._channel.close()


class _Addresses:
    """What came of the last connection to each address of a name.

    gRPC tells of the one that it tried last: of localhost often ::1, where nothing listens, although somebody at
    127.0.0.1 said what is wrong.
    """

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def telling(self, outcome: Outcome) -> Outcome:
        """Return *outcome*; of an address where nothing listens, with what another one said last, if it said more."""
        if not (address := _ADDRESS.search(outcome.message)):
            return outcome
        self._said[address[1]] = outcome.message
        if _REFUSED not in outcome.message:
            return outcome
        said = (it for there, it in self._said.items() if _REFUSED not in it and not _refuses(there))
        return replace(outcome, message=next(said, outcome.message))


def _refuses(address: str) -> bool:
    """Return whether nothing listens at *address* any more: gRPC may never try it last again."""
    host, _, port = unquote(address).partition(":")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LOOK_S).close()
    except (OSError, ValueError) as error:  # also of what is no address
        return isinstance(error, ConnectionRefusedError)
    return False


def grpc_metadata(settings: OtlpSettings) -> tuple[tuple[str, Any], ...]:
    """Return the headers of *settings* as grpcio takes them."""
    return tuple((name, v.encode() if name.endswith("-bin") else v) for name, v in settings.headers)


def grpc_credentials(settings: OtlpSettings) -> Any:
    """Return what a TLS channel needs of the certificates of *settings*."""
    import grpc

    files = (settings.certificate, settings.client_key, settings.client_certificate)
    return grpc.ssl_channel_credentials(*(path and path.read_bytes() for path in files))


def _failure(error: Any, secrets: tuple[str, ...]) -> Outcome:
    code = error.code().name
    wish = _retry_info(error)
    message = brief(f"{code}: {error.details()}", secrets)
    # Without RetryInfo waiting will not help an exhausted server: the request is too large, or a quota used up.
    if code in _RETRYABLE or (code == "RESOURCE_EXHAUSTED" and wish is not None):
        return Outcome(Verdict.RETRY, message=message, retry_after_s=wish)
    return Outcome(Verdict.REFUSED, message=message)


def _retry_info(error: Any) -> float | None:
    """Return the seconds of the RetryInfo in *error*'s trailers, None where there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                details = Status.FromString(value).details
            except DecodeError:
                return None
            for detail in details:
                info = RetryInfo()
                if detail.Is(RetryInfo.DESCRIPTOR) and detail.Unpack(info):
                    return bounded(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
    return None
