"""OTLP over HTTP/protobuf: one attempt, and what the answer says of it."""

import gzip
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any

import requests
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from urllib3.exceptions import HTTPError
from urllib3.util import Timeout

from otel_dltrace.export.otlp.outcome import (
    LONGEST_MESSAGE,
    USER_AGENT,
    Outcome,
    Verdict,
    accepted,
    bounded,
    brief,
    without,
)
from otel_dltrace.export.otlp.settings import OtlpSettings

_RETRYABLE = {429, 502, 503, 504}
_LARGEST_ANSWER = 4 << 20
"""Bytes: OTLP has a client bound what it reads of an answer, which may be a web page of any length."""

_BEGIN = 1 << 16
"""Bytes of an answer among which secrets are looked for; far fewer are told."""


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
        self._secrets = settings.secrets
        self._session = OtlpSession(settings)
        self._session.headers.update(settings.headers)
        self._session.headers.update({"content-type": "application/x-protobuf", "user-agent": USER_AGENT})
        if settings.gzip:
            self._session.headers["content-encoding"] = "gzip"
        if settings.client_certificate and settings.client_key:
            self._session.cert = (str(settings.client_certificate), str(settings.client_key))
        self._packed: tuple[bytes | None, bytes] = (None, b"")

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Make one attempt to send *body*."""
        data = self._pack(body) if self._gzip else body
        # requests hands it on; its own pair bounds each half only
        timeout_s = min(deadline_s, self._timeout_s)
        timeout: Any = Timeout(total=timeout_s)
        post, until = self._session.post, monotonic() + timeout_s
        try:
            with post(self._url, data=data, timeout=timeout, allow_redirects=False, stream=True) as response:
                answer = _read(response, until)
        # No server has answered: errors of requests are OSErrors, as is a certificate that vanished; some of urllib3's
        # about a proxy are ValueErrors, of an answer HTTPErrors. What waits is sent by `recover` once that is mended.
        except (OSError, ValueError, HTTPError) as error:
            return Outcome(Verdict.RETRY, message=brief(_cause(error), self._secrets))
        return _outcome(response, answer, self._secrets)

    def close(self) -> None:
        """Close the connections that are idle."""
        self._session.close()

    def _pack(self, body: bytes) -> bytes:
        """Return *body* compressed, once for all attempts; the fastest level, as spans repeat themselves."""
        if self._packed[0] is not body:
            self._packed = (body, gzip.compress(body, compresslevel=1, mtime=0))
        return self._packed[1]


def _cause(error: Exception) -> object:
    """Return what urllib3 says went wrong, without the two wrappings that repeat the address."""
    return getattr(error.args[0], "reason", error) if error.args else error


def _read(response: requests.Response, until: float) -> bytes:
    """Return the body of *response*, of a longer one so much that it is no message any more.

    Raises:
        TimeoutError: It comes byte by byte, and is not whole *until* then: timeouts of sockets are for each read.
    """
    body = b""
    read = getattr(response.raw, "read1", response.raw.read)  # urllib3 1 has no read1
    while part := read(1 << 16, decode_content=True):
        body += part
        if len(body) > _LARGEST_ANSWER:
            break
        if monotonic() >= until:
            raise TimeoutError("the answer timed out")
    return body


def _outcome(response: requests.Response, answer: bytes, secrets: tuple[str, ...]) -> Outcome:
    status = response.status_code
    if 200 <= status < 300:
        return _taken(response.headers.get("content-type", ""), answer, secrets)
    message = brief(f"HTTP {status}: {_message(response, answer, secrets)}", secrets)
    if status in _RETRYABLE:
        return Outcome(Verdict.RETRY, message=message, retry_after_s=_retry_after(response))
    return Outcome(Verdict.REFUSED, message=message)


def _taken(content_type: str, answer: bytes, secrets: tuple[str, ...]) -> Outcome:
    """Return what an *answer* means that says yes; a page of a web server does, too."""
    kind = content_type.partition(";")[0].strip().lower() if answer else ""  # an empty one is OTLP's in any
    readers = {"application/x-protobuf": [_from_protobuf], "application/json": [_from_json]}
    for read in readers.get(kind, [] if kind else [_from_protobuf, _from_json]):
        with suppress(DecodeError, json_format.ParseError, UnicodeDecodeError):
            return accepted(read(answer), secrets)
    return Outcome(Verdict.ACCEPTED, answered_in=brief(kind, secrets) or "no known type")


def _from_protobuf(answer: bytes) -> ExportTraceServiceResponse:
    taken: ExportTraceServiceResponse = ExportTraceServiceResponse.FromString(answer)
    return taken


def _from_json(answer: bytes) -> ExportTraceServiceResponse:
    """Return an *answer* that is not in what was asked in, and is OTLP's all the same."""
    taken: ExportTraceServiceResponse = json_format.Parse(answer, ExportTraceServiceResponse())
    return taken


def _message(response: requests.Response, answer: bytes, secrets: tuple[str, ...]) -> str:
    if 300 <= response.status_code < 400:
        return f"sent on to {response.headers.get('location', 'nowhere')}: set the endpoint to that address"
    if response.headers.get("content-type") == "application/x-protobuf":
        with suppress(DecodeError):
            return str(Status.FromString(answer).message).strip() or str(response.reason)
    begin = without(answer[:_BEGIN].decode("utf-8", "replace"), secrets)  # before it is cut, perhaps in one of them
    return begin[:LONGEST_MESSAGE].strip() or str(response.reason)


def _retry_after(response: requests.Response) -> float | None:
    """Return the seconds of the Retry-After header, which holds a number or a date."""
    wish = response.headers.get("retry-after", "").strip()
    if wish.isascii() and wish.isdigit():
        return bounded(float(wish))
    try:
        then = parsedate_to_datetime(wish)
    except (TypeError, ValueError):
        return None
    if then.tzinfo is None:  # "-0000" says UTC without a zone
        then = then.replace(tzinfo=timezone.utc)
    return bounded((then - datetime.now(timezone.utc)).total_seconds())
