"""One attempt to hand an encoded request to a collector, over gRPC or HTTP; what came of it is a value."""

import gzip
import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, Protocol

import requests
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from urllib3.util import Timeout

from otel_dltrace._version import __version__
from otel_dltrace.export.otlp.settings import GRPC, OtlpSettings
from otel_dltrace.model.errors import ConfigError

_USER_AGENT = f"otel-dltrace/{__version__}"
_GRPC_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_GRPC_RETRYABLE = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
_HTTP_RETRYABLE = {429, 502, 503, 504}
_LONGEST_WISH_S = 3600.0
"""A server's clock or configuration may be wrong, and must not silence a run for good."""
_LONGEST_MESSAGE = 300
_LARGEST_ANSWER = 4 << 20
"""Bytes: OTLP has a client bound what it reads of an answer, which may be a web page of any length."""


class Verdict(Enum):
    """What a collector made of a request."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one attempt.

    Attributes:
        rejected: Spans of an accepted request that the collector left out; they are not to be sent again.
        message: What the collector, or the network, said.
        retry_after_s: How long the collector wants to be left alone; None where it did not say.
        answered_in: The content type of an answer over HTTP that is none of OTLP: any web server may say yes to all.
    """

    verdict: Verdict
    rejected: int = 0
    message: str = ""
    retry_after_s: float | None = None
    answered_in: str = ""


class Transport(Protocol):
    """A way to a collector."""

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Make one attempt to send *body*, an encoded request, within *deadline_s* and the settings' timeout."""

    def close(self) -> None:
        """Give the connection back; an attempt under way may be cut short."""


def connect(settings: OtlpSettings) -> Transport:
    """Return the way to the collector of *settings*; the network is first touched by `send`.

    Raises:
        ConfigError: A certificate or key cannot be used.
    """
    _check_certificates(settings)
    return GrpcTransport(settings) if settings.protocol == GRPC else HttpTransport(settings)


class GrpcTransport:
    """OTLP over gRPC, with the request's bytes passed through as they are."""

    def __init__(self, settings: OtlpSettings) -> None:
        import grpc

        self._rpc_error: type[Exception] = grpc.RpcError
        self._timeout_s = settings.timeout_s
        self._metadata = grpc_metadata(settings)
        options = [
            ("grpc.primary_user_agent", _USER_AGENT),
            # The sender does the waiting; with grpcio's own limit of 2 min a restarted collector is noticed late.
            ("grpc.initial_reconnect_backoff_ms", 250),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        compression = grpc.Compression.Gzip if settings.gzip else grpc.Compression.NoCompression
        if settings.tls:
            self._channel = grpc.secure_channel(settings.endpoint, grpc_credentials(settings), options, compression)
        else:
            self._channel = grpc.insecure_channel(settings.endpoint, options, compression)
        self._export = self._channel.unary_unary(
            _GRPC_METHOD, response_deserializer=ExportTraceServiceResponse.FromString
        )

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Make one attempt to send *body*."""
        timeout = min(deadline_s, self._timeout_s)
        try:
            return _accepted(self._export(body, timeout=timeout, metadata=self._metadata))
        except self._rpc_error as error:
            return _grpc_failure(error)

    def close(self) -> None:
        """Close the channel; an attempt under way is cancelled."""
        self._channel.close()


def grpc_metadata(settings: OtlpSettings) -> tuple[tuple[str, Any], ...]:
    """Return the headers of *settings* as grpcio takes them."""
    return tuple((name, v.encode() if name.endswith("-bin") else v) for name, v in settings.headers)


def grpc_credentials(settings: OtlpSettings) -> Any:
    """Return what a TLS channel needs of the certificates of *settings*."""
    import grpc

    files = (settings.certificate, settings.client_key, settings.client_certificate)
    return grpc.ssl_channel_credentials(*(path and path.read_bytes() for path in files))


class OtlpSession(requests.Session):
    """Trusts the certificate and shows the token of *settings*, whatever else the environment says of the two."""

    def __init__(self, settings: OtlpSettings) -> None:
        super().__init__()
        self._certificate = str(settings.certificate) if settings.certificate else True
        if "authorization" in dict(settings.headers):
            self.auth = lambda request: request  # else an entry in ~/.netrc replaces the header

    def request(self, method: Any, url: Any, *args: Any, **more: Any) -> requests.Response:
        """Make a request."""
        # Given with each: as session.verify, REQUESTS_CA_BUNDLE would win over the certificate asked for.
        return super().request(method, url, *args, **{"verify": self._certificate, **more})


class HttpTransport:
    """OTLP over HTTP/protobuf; proxies and certificates of the environment count, as they do with requests."""

    def __init__(self, settings: OtlpSettings) -> None:
        self._url = settings.endpoint
        self._gzip = settings.gzip
        self._timeout_s = settings.timeout_s
        self._session = OtlpSession(settings)
        self._session.headers.update(settings.headers)
        self._session.headers.update({"content-type": "application/x-protobuf", "user-agent": _USER_AGENT})
        if settings.gzip:
            self._session.headers["content-encoding"] = "gzip"
        if settings.client_certificate and settings.client_key:
            self._session.cert = (str(settings.client_certificate), str(settings.client_key))
        self._packed: tuple[bytes | None, bytes] = (None, b"")

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Make one attempt to send *body*."""
        data = self._pack(body) if self._gzip else body
        timeout: Any = Timeout(
            total=min(deadline_s, self._timeout_s)
        )  # requests hands it on; its own pair bounds each half only
        try:
            with self._session.post(
                self._url, data=data, timeout=timeout, allow_redirects=False, stream=True
            ) as response:
                answer = _read(response)
        except ValueError as error:  # requests' names for a URL or header that cannot be used
            return Outcome(Verdict.REFUSED, message=_brief(error))
        except OSError as error:  # every other error of requests, and a certificate that vanished
            return Outcome(Verdict.RETRY, message=_brief(_cause(error)))
        return _http_outcome(response, answer)

    def close(self) -> None:
        """Close the connections that are idle."""
        self._session.close()

    def _pack(self, body: bytes) -> bytes:
        """Return *body* compressed, once for all attempts; the fastest level, as spans repeat themselves."""
        if self._packed[0] is not body:
            self._packed = (body, gzip.compress(body, compresslevel=1, mtime=0))
        return self._packed[1]


def _check_certificates(settings: OtlpSettings) -> None:
    """Find a damaged certificate now, since grpcio would call it an unavailable server for ever."""
    try:
        context = ssl.create_default_context(cafile=settings.certificate)
        if settings.client_certificate:
            context.load_cert_chain(settings.client_certificate, settings.client_key, password="")  # never ask
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(str(p) for p in (settings.certificate, settings.client_certificate, settings.client_key) if p)
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE or _CLIENT_KEY cannot be used ({files}: {error}): "
            "name PEM files that belong together, the key without a password"
        ) from None


def _accepted(response: ExportTraceServiceResponse) -> Outcome:
    partial = response.partial_success
    return Outcome(Verdict.ACCEPTED, partial.rejected_spans, _brief(partial.error_message))


def _grpc_failure(error: Any) -> Outcome:
    code = error.code().name
    wish = _retry_info(error)
    message = _brief(f"{code}: {error.details()}")
    # Without RetryInfo waiting will not help an exhausted server: the request is too large, or a quota used up.
    if code in _GRPC_RETRYABLE or (code == "RESOURCE_EXHAUSTED" and wish is not None):
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
                    return _bounded(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
    return None


def _cause(error: OSError) -> object:
    """Return what urllib3 says went wrong, without the two wrappings that repeat the address."""
    return getattr(error.args[0], "reason", error) if error.args else error


def _read(response: requests.Response) -> bytes:
    """Return the body of *response*, of a longer one so much that it is no message any more."""
    body = b""
    for part in response.iter_content(1 << 16):
        body += part
        if len(body) > _LARGEST_ANSWER:
            break
    return body


def _http_outcome(response: requests.Response, answer: bytes) -> Outcome:
    status = response.status_code
    if 200 <= status < 300:
        return _http_accepted(response.headers.get("content-type", ""), answer)
    message = _brief(f"HTTP {status}: {_http_message(response, answer)}")
    if status in _HTTP_RETRYABLE:
        return Outcome(Verdict.RETRY, message=message, retry_after_s=_retry_after(response))
    return Outcome(Verdict.REFUSED, message=message)


def _http_accepted(content_type: str, answer: bytes) -> Outcome:
    """Return what an *answer* means that says yes; a page of a web server does, too."""
    kind = content_type.partition(";")[0].strip().lower() if answer else ""  # an empty one is OTLP's in any
    readers = {"application/x-protobuf": [_from_protobuf], "application/json": [_from_json]}
    for read in readers.get(kind, [] if kind else [_from_protobuf, _from_json]):
        with suppress(DecodeError, json_format.ParseError, UnicodeDecodeError):
            return _accepted(read(answer))
    return Outcome(Verdict.ACCEPTED, answered_in=kind or "no known type")


def _from_protobuf(answer: bytes) -> ExportTraceServiceResponse:
    taken: ExportTraceServiceResponse = ExportTraceServiceResponse.FromString(answer)
    return taken


def _from_json(answer: bytes) -> ExportTraceServiceResponse:
    """Return an *answer* that is not in what was asked in, and is OTLP's all the same."""
    taken: ExportTraceServiceResponse = json_format.Parse(answer, ExportTraceServiceResponse())
    return taken


def _http_message(response: requests.Response, answer: bytes) -> str:
    if 300 <= response.status_code < 400:
        return f"sent on to {response.headers.get('location', 'nowhere')}: set the endpoint to that address"
    if response.headers.get("content-type") == "application/x-protobuf":
        try:
            return str(Status.FromString(answer).message)
        except DecodeError:
            pass
    return answer[:_LONGEST_MESSAGE].decode("utf-8", "replace").strip() or str(response.reason)


def _retry_after(response: requests.Response) -> float | None:
    """Return the seconds of the Retry-After header, which holds a number or a date."""
    wish = response.headers.get("retry-after", "").strip()
    if wish.isascii() and wish.isdigit():
        return _bounded(float(wish))
    try:
        then = parsedate_to_datetime(wish)
    except (TypeError, ValueError):
        return None
    if then.tzinfo is None:  # "-0000" says UTC without a zone
        then = then.replace(tzinfo=timezone.utc)
    return _bounded((then - datetime.now(timezone.utc)).total_seconds())


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), _LONGEST_WISH_S)


def _brief(text: object) -> str:
    """Return one line of printable text, short enough for a summary."""
    return " ".join(str(text).split())[:_LONGEST_MESSAGE]
