"""Asks a collector, with an empty request, whether it answers; looks at the certificate that it shows."""

import re
import ssl
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from socket import create_connection
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.settings import GRPC, HTTP, OtlpSettings
from otel_dltrace.export.otlp.transport import connect, tls_context

_EMPTY = b""
"""An encoded request without a span or a metric; collectors answer it as any other."""
_SPOKEN = re.compile(r"HTTP 40[13]\b|(UNAUTHENTICATED|PERMISSION_DENIED): (?!Received http2)")
"""Who says this of an empty request speaks the protocol, and minds the token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one empty request, after how many seconds."""

    outcome: Outcome
    seconds: float

    @property
    def is_spoken(self) -> bool:
        """Whether the other side speaks our protocol, whatever it says."""
        is_taken = self.outcome.verdict is Verdict.ACCEPTED and not self.outcome.answered_in
        return is_taken or bool(_SPOKEN.match(self.outcome.message))


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate that a server showed, and that was found good."""

    subject: str
    issuer: str
    expires: datetime


def probe(settings: OtlpSettings, timeout_s: float) -> Answer:
    """Send one empty request.

    Raises:
        ConfigError: A certificate or key cannot be used.
    """
    transport = connect(settings)
    begun = monotonic()
    try:
        return Answer(transport.send(_EMPTY, timeout_s), monotonic() - begun)
    finally:
        transport.close()


def other_ways(settings: OtlpSettings) -> list[OtlpSettings]:
    """Return the same address under the other protocol, with and without TLS, the likelier first.

    Who asked for TLS meant its headers, a token among them, for nobody to read: without TLS they are left out.
    """
    if host_and_port(settings) is None:
        return []
    other = HTTP if settings.protocol == GRPC else GRPC
    ways = [(other, settings.tls), (settings.protocol, not settings.tls), (other, not settings.tls)]
    return [_under(settings, protocol, tls) for protocol, tls in ways]


def _under(settings: OtlpSettings, protocol: str, tls: bool) -> OtlpSettings:
    host, port = host_and_port(settings) or ("", 0)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = f"/v1/{settings.signal.lower()}" if settings.protocol == GRPC else urlsplit(settings.endpoint).path
    url = f"{'https' if tls else 'http'}://{address}{path}"
    headers = () if settings.tls and not tls else settings.headers
    return replace(settings, endpoint=address if protocol == GRPC else url, protocol=protocol, tls=tls, headers=headers)


def host_and_port(settings: OtlpSettings) -> tuple[str, int] | None:
    """Return where a connection goes; None where that is no TCP address of this kind (a socket file)."""
    if settings.protocol == GRPC:
        address = settings.endpoint.removeprefix("dns:///")
        url = urlsplit(f"//{address}")
        if address.startswith(("unix:", "unix-abstract:", "ipv4:", "ipv6:", "dns:")) or not url.hostname:
            return None
        return url.hostname, url.port or 443
    url = urlsplit(settings.endpoint)
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def certificate(settings: OtlpSettings, timeout_s: float) -> Certificate | None:
    """Return the server's certificate, None where there is no TLS to look at.

    Raises:
        OSError: There is no connection, or the certificate is not good (``ssl.SSLCertVerificationError``).
    """
    address = host_and_port(settings)
    if not settings.tls or address is None:
        return None
    context = tls_context(settings)
    with (
        create_connection(address, timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as secured,
    ):
        shown: Any = secured.getpeercert()
    expires = datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), timezone.utc)
    return Certificate(_name(shown["subject"]), _name(shown["issuer"]), expires)


def _name(parts: tuple[tuple[tuple[str, str], ...], ...]) -> str:
    """Return the common name of a certificate's subject, or all of it."""
    pairs = [pair for part in parts for pair in part]
    return dict(pairs).get("commonName") or ", ".join(value for _, value in pairs)
