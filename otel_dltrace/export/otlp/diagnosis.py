"""What a collector's answer, or its silence, means, and what to do about it; told in doctor and at the end of a run.

The words are those of requests, grpcio and the OpenTelemetry Collector, as seen from the real ones.
"""

import re
from typing import NamedTuple

from otel_dltrace.export.otlp.settings import GRPC, HTTP, OtlpSettings

ENDPOINT, PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
CERTIFICATE, HEADERS = "OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_HEADERS"
_CLIENT = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY"
_BY_PROXY = "{where} is not reached through the proxy that the environment names"


class Diagnosis(NamedTuple):
    """What is the matter, and what to do."""

    what: str
    cure: str

    def __str__(self) -> str:
        """Return both as one sentence."""
        return f"{self.what}: {self.cure}"


class _Case(NamedTuple):
    """A message that matches *seen* means *what*; *only* is the protocol it is said with, "" for both."""

    seen: str
    what: str
    cure: str
    only: str = ""


_CASES = (
    _Case(  # said by ourselves, with the words of OpenSSL
        "^OTEL_EXPORTER_OTLP_CERTIFICATE, .* cannot be used",
        "{where} is not asked, since a certificate or key cannot be used",
        f"name PEM files that belong together in {CERTIFICATE} and {_CLIENT}, the key without a password",
    ),
    _Case(  # before the others: what follows is said of the proxy
        "Unable to connect to proxy|SOCKSConnection|proxy URL",
        _BY_PROXY,
        "correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, or name its host in NO_PROXY",
        HTTP,
    ),
    _Case(
        "SOCKS support",
        "{where} is behind a SOCKS proxy, which Python needs PySocks for",
        "pip install requests[socks], or correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY",
        HTTP,
    ),
    _Case(
        "HTTP proxy returned|elsewhere: ",
        _BY_PROXY,
        "correct grpc_proxy, https_proxy or http_proxy, or name its host in no_proxy: gRPC reads them in lower case",
        GRPC,
    ),
    _Case(
        "Connection refused|unix:.*No such file",
        "nothing listens at {where}",
        f"start the collector, or correct {ENDPOINT}",
    ),
    _Case(
        "failed to resolve|errors resolving|resolution failed|lookup failed|Name or service not known",
        "the host of {where} is not known",
        f"correct the name in {ENDPOINT}",
    ),
    _Case(  # what a firewall says that rejects, too
        "No route to host|Network is unreachable|Host is down|Network is down",
        "there is no way from this host to {where}",
        f"see whether its host is up, and what the firewalls between let through, or correct {ENDPOINT}",
    ),
    _Case(
        "Hostname mismatch|Hostname Verification|IP address mismatch",
        "the certificate of {where} is for another name",
        f"use a name of the certificate in {ENDPOINT}",
    ),
    _Case("certificate has expired", "the certificate of {where} has expired", "renew it"),
    _Case(
        "certificate is not yet valid",
        "the certificate of {where} is not valid yet",
        "set the clock of this host, or see when it becomes valid",
    ),
    _Case(
        "certificate purpose",
        "the certificate of {where} is not one for a server",
        "have its authority sign one with the extended key usage serverAuth",
    ),
    _Case(  # what OpenSSL is strict about, in Python from 3.13 on
        "verify failed: .*(Key Identifier|Basic Constraints|key ?usage|too weak)",
        "the certificate of {where}, or its authority's, is not as it must be ({said})",
        "have it reissued",
    ),
    _Case(
        "certificate.verify.failed",
        "the certificate of {where} is signed by nobody we trust",
        f"name the PEM file of its authority in {CERTIFICATE}",
    ),
    _Case(
        "alert.certificate.expired",
        "{where} does not accept our certificate, which has expired",
        f"renew what {_CLIENT} name",
    ),
    _Case(
        "certificate.(required|revoked|unknown)|unsupported.certificate|Unwrap failed|bad certificate|unknown ca",
        "{where} does not accept our certificate",
        f"name one that its authority signed in {_CLIENT}",
    ),
    _Case(  # the same, where the connection is closed before its reason is read
        "EOF occurred in violation|Socket closed, over TLS",
        "{where} hangs up, as one does that does not accept our certificate",
        f"name one that its authority signed in {_CLIENT}, or write http:// in {ENDPOINT} if it speaks no TLS",
    ),
    _Case(
        "unix.*wrong.version.number",
        "{where} speaks no TLS",
        "set OTEL_EXPORTER_OTLP_INSECURE=true, which an address without http:// needs",
        GRPC,
    ),
    _Case(
        "wrong.version.number|record layer failure|packet length too long",
        "{where} speaks no TLS",
        f"write http:// in {ENDPOINT}",
    ),
    _Case("HTTP request to an HTTPS server", "{where} speaks TLS", f"write https:// in {ENDPOINT}"),
    _Case("Socket closed", "{where} hangs up", f"if it speaks TLS, write https:// in {ENDPOINT}", GRPC),
    _Case(
        "unknown (service|method)|Method not found",
        "{where} has no such OTLP service ({said})",
        f"correct the port in {ENDPOINT}",
        GRPC,
    ),
    _Case(
        "connect an http1|Expected SETTINGS|http2 header with status|UNIMPLEMENTED",
        "{where} speaks HTTP, and not gRPC",
        f"set {PROTOCOL}={HTTP}, or write its gRPC port, as a rule 4317, in {ENDPOINT}",
        GRPC,
    ),
    _Case(
        "Connection.(reset|aborted)|RemoteDisconnected|BadStatusLine|HTTP 505",
        "{where} hangs up on HTTP, as a gRPC port does, or one that speaks TLS",
        f"set {PROTOCOL}={GRPC}, or write its HTTP port, as a rule 4318, or https:// in {ENDPOINT}",
        HTTP,
    ),
    _Case(
        "Connection broken",
        "{where} hangs up in the middle of its answer",
        "see the log of the collector, or of the proxy before it, for why",
        HTTP,
    ),
    _Case("HTTP 40[45]", "{where} is not an OTLP receiver ({said})", f"correct the port or path in {ENDPOINT}", HTTP),
    _Case(
        "HTTP 413|larger than max|message too large",
        "{where} finds a request too large ({said})",
        "raise max_request_body_size (HTTP) or max_recv_msg_size_mib (gRPC) of its otlp receiver",
    ),
    _Case(
        "HTTP 429|RESOURCE_EXHAUSTED",
        "{where} asks for less ({said})",
        "give it more capacity, or send fewer steps in full (OTEL_DLTRACE_STEPS)",
    ),
    _Case(
        "timed out|DEADLINE_EXCEEDED|no answer before",
        "{where} does not answer in time",
        f"see whether it is stuck, or whether {ENDPOINT} is another host's",
    ),
    _Case("HTTP 50[234]|UNAVAILABLE", "{where} takes no spans for now ({said})", "see the collector's log for why"),
    _Case("HTTP 3..", "{where} is somewhere else ({said})", f"correct {ENDPOINT}", HTTP),
)
_DENIED = re.compile("HTTP 40[13]|UNAUTHENTICATED|PERMISSION_DENIED")


def diagnose(settings: OtlpSettings, message: str) -> Diagnosis:
    """Return what *message*, an `Outcome`'s that was not accepted, says of the collector of *settings*."""
    found = _case_of(settings, message)
    return found._replace(cure=by_own_names(settings, found.cure))


def doubt(settings: OtlpSettings, answered_in: str) -> Diagnosis:
    """Return what it says of the collector of *settings* that it says yes in the content type *answered_in*."""
    what = f"{settings.where} says yes in {answered_in}, which is not an answer of OTLP, so spans may vanish there"
    cure = f"see whether another server listens there, and correct {ENDPOINT}"
    return Diagnosis(what, by_own_names(settings, cure))


def by_own_names(settings: OtlpSettings, cure: str) -> str:
    """Return *cure* with the variables that count: beside one of the signal's own the common one says nothing."""
    for common, own in settings.renamed:
        cure = re.sub(rf"\b{common}\b", own, cure)
    return cure


def _case_of(settings: OtlpSettings, message: str) -> Diagnosis:
    heard = f"elsewhere: {message}" if _is_elsewhere(settings, message) else message
    heard = heard.replace("Socket closed", "Socket closed, over TLS") if settings.tls else heard
    for case in _CASES:
        if case.only in ("", settings.protocol) and re.search(case.seen, heard, re.IGNORECASE):
            what = case.what.format(where=settings.where, said=message)
            return Diagnosis(what, case.cure)
    if _DENIED.match(message):
        return _denied(settings, message)
    return Diagnosis(f"{settings.where} takes no spans ({message})", "see the collector's log for why")


def _is_elsewhere(settings: OtlpSettings, message: str) -> bool:
    """Return whether gRPC dialled another port than the endpoint's: a proxy's, which it does not call one."""
    dialled = re.search(r":(\d+): (Failed to connect|\[field:hostname lookup)", message)
    return dialled is not None and dialled[1] not in ("443", *re.findall(r":(\d+)", settings.endpoint))


def _denied(settings: OtlpSettings, message: str) -> Diagnosis:
    has_token = any(name == "authorization" for name, _ in settings.headers)
    what = "does not accept our token" if has_token else "wants a token, and we send none"
    how = "correct it in" if has_token else "write authorization=Bearer%20TOKEN in"
    return Diagnosis(f"{settings.where} {what} ({message})", f"{how} {HEADERS}")
