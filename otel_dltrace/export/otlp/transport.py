"""The way to a collector: one attempt to hand it an encoded request."""

import ssl
from typing import TYPE_CHECKING, Protocol

from otel_dltrace.export.otlp.settings import GRPC, OtlpSettings
from otel_dltrace.model.errors import ConfigError

if TYPE_CHECKING:
    from otel_dltrace.export.otlp.outcome import Outcome


class Transport(Protocol):
    """A way to a collector."""

    def send(self, body: bytes, deadline_s: float) -> "Outcome":
        """Make one attempt to send *body*, an encoded request, within *deadline_s* and the settings' timeout."""

    def close(self) -> None:
        """Give the connection back; an attempt under way may be cut short."""


def connect(settings: OtlpSettings) -> Transport:
    """Return the way to the collector of *settings*; the network is first touched by `send`.

    Raises:
        ConfigError: A certificate or key cannot be used.
    """
    check_certificates(settings)
    if settings.protocol == GRPC:
        from otel_dltrace.export.otlp.grpc_transport import GrpcTransport

        return GrpcTransport(settings)
    from otel_dltrace.export.otlp.http_transport import HttpTransport

    return HttpTransport(settings)


def check_certificates(settings: OtlpSettings) -> None:
    """Find a damaged certificate now, since grpcio would call it an unavailable server for ever.

    Raises:
        ConfigError: A certificate or key cannot be used.
    """
    try:
        tls_context(settings)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(str(p) for p in (settings.certificate, settings.client_certificate, settings.client_key) if p)
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE or _CLIENT_KEY cannot be used ({files}: {error}): "
            "name PEM files that belong together, the key without a password"
        ) from None


def tls_context(settings: OtlpSettings) -> ssl.SSLContext:
    """Return whom Python's own TLS trusts, and what it shows, by the certificates of *settings*.

    Raises:
        OSError: One of them cannot be used.
    """
    context = ssl.create_default_context(cafile=settings.certificate)
    if settings.client_certificate:
        context.load_cert_chain(settings.client_certificate, settings.client_key, password="")  # never ask
    return context
