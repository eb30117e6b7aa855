"""Requests reach a real collector by every way there is; what goes wrong on the way is said, bounded and made good."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from shutil import copy

import grpc
import pytest
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.diagnosis import diagnose
from otel_dltrace.export.otlp.grpc_transport import _Addresses
from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.pause import pause_s
from otel_dltrace.export.otlp.renewed import Renewed
from otel_dltrace.export.otlp.resend import resend
from otel_dltrace.export.otlp.sender import Sender
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.spill import Spill
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.export.otlp.waiting import NO_ROOM, SPILL_FULL
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.summary import REFUSED
from otel_dltrace.record import guard
from tests.support import servers
from tests.support.certificates import make_certificates
from tests.support.paths import ROOT
from tests.support.processes import room_for
from tests.support.told import Told, grpc_server, http_server, response

PROTOCOLS = ("grpc", "http/protobuf")
SERVER_FILES = {"cert_file": "server", "key_file": "server_key", "client_ca_file": "authority"}
ACCEPTED = Outcome(Verdict.ACCEPTED)


def settings_for(endpoint, protocol="http/protobuf", **more):
    """Return the settings that a user's environment would give."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    settings = OtlpSettings.from_env(env | {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in more.items()})
    assert settings is not None
    return settings


def endpoint_of(server, protocol):
    return server.grpc if protocol == "grpc" else server.http


@contextmanager
def connected(settings):
    transport = connect(settings)
    try:
        yield transport
    finally:
        transport.close()


def attribute(key, **value):
    return KeyValue(key=key, value=AnyValue(**value))


def request_of(*span_ids, trace=1 << 127):
    """Return a request with one span for each id; every field is set, attributes in alphabetic order."""
    now = time.time_ns()
    spans = [
        Span(
            trace_id=trace.to_bytes(16, "big"),
            span_id=number.to_bytes(8, "big"),
            parent_span_id=span_ids[0].to_bytes(8, "big") if number != span_ids[0] else b"",
            flags=1,
            trace_state="vendor=value",
            name="all_reduce",
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=now + number,
            end_time_unix_nano=now + number + 1234,
            attributes=[
                attribute("dl.comm.async", bool_value=True),
                attribute("dl.comm.size", int_value=1 << 40),
                attribute("dl.loss", double_value=0.5),
                attribute("dl.ranks", array_value=ArrayValue(values=[AnyValue(int_value=n) for n in (3, 1, 2)])),
                attribute("dl.tensor.name", string_value="layer1.weight \u00e4"),
            ],
            events=[Span.Event(time_unix_nano=now, name="wait", attributes=[attribute("n", int_value=-1)])],
            links=[Span.Link(trace_id=b"\x81" * 16, span_id=b"\x02" * 8)],
            status=SpanStatus(code=SpanStatus.STATUS_CODE_ERROR, message="peer gone"),
        )
        for number in span_ids
    ]
    resource = Resource(attributes=[attribute("dl.rank", int_value=3), attribute("service.name", string_value="job")])
    scope = InstrumentationScope(name="otel_dltrace.torch", version="0.1.0")
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=resource, scope_spans=[ScopeSpans(scope=scope, spans=spans)])]
    )


def body_of(*span_ids):
    return request_of(*span_ids).SerializeToString()


def traces_with(data, span_id):
    """Return the part of *data* that arrived together with *span_id*."""
    whole = [r for r in data.resource_spans if span_id in {s.span_id for scope in r.scope_spans for s in scope.spans}]
    return TracesData(resource_spans=whole)


def ids(spans):
    return {int.from_bytes(span.span_id, "big") for span in spans}


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "endpoint", "tls"),
    [
        pytest.param({"ENDPOINT": "http://h:4318"}, "http://h:4318/v1/traces", False, id="base"),
        pytest.param({"ENDPOINT": "https://h/otlp/"}, "https://h/otlp/v1/traces", True, id="base with a path"),
        pytest.param({"TRACES_ENDPOINT": "http://h:1/x"}, "http://h:1/x", False, id="for traces, as it is"),
        pytest.param({"TRACES_ENDPOINT": "http://h:1"}, "http://h:1/", False, id="for traces, the root"),
        pytest.param({"ENDPOINT": "http://a", "TRACES_ENDPOINT": "http://b/t"}, "http://b/t", False, id="traces win"),
        pytest.param({"ENDPOINT": "http://h:4317", "PROTOCOL": "grpc"}, "h:4317", False, id="grpc http"),
        pytest.param({"ENDPOINT": "https://h", "PROTOCOL": "grpc"}, "h:443", True, id="grpc https"),
        pytest.param({"ENDPOINT": "http://[::1]:7", "PROTOCOL": "grpc"}, "[::1]:7", False, id="grpc IPv6"),
        pytest.param({"ENDPOINT": "h:4317", "PROTOCOL": "grpc"}, "h:4317", True, id="grpc without scheme"),
        pytest.param({"ENDPOINT": "me:pass@h:4317", "PROTOCOL": "grpc"}, "h:4317", True, id="grpc with a password"),
        pytest.param({"ENDPOINT": "h:4317/v1/traces", "PROTOCOL": "grpc"}, "h:4317", True, id="grpc with a path"),
        pytest.param({"ENDPOINT": "[::1]/", "PROTOCOL": "grpc"}, "[::1]", True, id="grpc IPv6 without scheme"),
        pytest.param({"ENDPOINT": "unix:/run/o.sock", "PROTOCOL": "grpc"}, "unix:/run/o.sock", True, id="grpc file"),
        pytest.param(
            {"ENDPOINT": "h:4317", "PROTOCOL": "grpc", "INSECURE": "true"}, "h:4317", False, id="grpc insecure"
        ),
        pytest.param(
            {"ENDPOINT": "http://h:4317", "PROTOCOL": "http/protobuf", "TRACES_PROTOCOL": "grpc"},
            "h:4317",
            False,
            id="protocol for traces",
        ),
        pytest.param(
            {"ENDPOINT": "unix:///run/otel.sock", "PROTOCOL": "grpc", "INSECURE": "True"},
            "unix:///run/otel.sock",
            False,
            id="grpc over a socket file",
        ),
    ],
)
def test_the_endpoint_follows_the_specification(env, endpoint, tls):
    """Path, port and TLS come from the URL and the protocol as OpenTelemetry says."""
    settings = OtlpSettings.from_env({f"OTEL_EXPORTER_OTLP_{name}": value for name, value in env.items()})
    assert settings is not None
    assert (settings.endpoint, settings.tls) == (endpoint, tls)


def test_every_variable_counts_and_the_one_for_traces_wins(tmp_path):
    """What is set for traces replaces what is set for all signals, an empty value counts as unset."""
    for name in ("ca.pem", "key.pem", "cert.pem"):
        (tmp_path / name).touch()
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://h",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=all",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "Authorization=%20Bearer%20x=%2C, ,b = c,b=d",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3.5",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem"),
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(tmp_path / "key.pem"),
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(tmp_path / "cert.pem"),
    }
    assert OtlpSettings.from_env(env) == OtlpSettings(
        endpoint="https://h/v1/traces",
        protocol="http/protobuf",
        headers=(("authorization", "Bearer x=,"), ("b", "d")),
        timeout_s=3.5,
        gzip=True,
        tls=True,
        certificate=tmp_path / "ca.pem",
        client_key=tmp_path / "key.pem",
        client_certificate=tmp_path / "cert.pem",
    )


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, id="empty"),
        pytest.param({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h"}, id="another signal"),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "none"}, id="switched off"),
    ],
)
def test_without_an_endpoint_nothing_is_sent(env):
    """The embedded default is the run directory alone."""
    assert OtlpSettings.from_env(env) is None


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("ENDPOINT", "localhost:4318", "ENDPOINT='localhost:4318' is not a URL: write http://host:4318 or https"),
        ("ENDPOINT", "http://u:pw@h:x", "ENDPOINT='http://h:x' is not a URL (Port could not be cast"),
        ("ENDPOINT", "http://a b:4318", "ENDPOINT='http://a b:4318' is not a URL (a space in the host): write http"),
        ("ENDPOINT", "u:pw@h:4318", "ENDPOINT='h:4318' is not a URL: write http://host:4318 or https"),
        ("PROTOCOL", "http/json", "PROTOCOL='http/json' is not a protocol we speak: write grpc or http/protobuf"),
        ("TRACES_TIMEOUT", "10s", "TRACES_TIMEOUT='10s' is not a number of seconds above 0: write 10"),
        ("TIMEOUT", "nan", "TIMEOUT='nan' is not a number of seconds above 0"),
        ("TIMEOUT", "0", "TIMEOUT='0' is not a number of seconds above 0"),
        ("COMPRESSION", "zstd", "COMPRESSION='zstd' is not a compression we know: write gzip or none"),
        ("INSECURE", "yes", "INSECURE='yes' is neither true nor false"),
        ("CERTIFICATE", "/no/such.pem", "CERTIFICATE='/no/such.pem' is not a file that can be read"),
        ("CERTIFICATE", "x" * 300, f"CERTIFICATE='{'x' * 300}' is not a file that can be read"),
        ("CLIENT_KEY", f"-----BEGIN KEY-----\n{'secret' * 60}", "CLIENT_KEY has the text of a PEM file as its value"),
        ("CLIENT_KEY", __file__, "CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE need each other"),
        ("HEADERS", "a=b,secret", "HEADERS: entry 2 is not name=value: write name=value,name2=value2"),
        ("HEADERS", "a=secret%0d%0ax", "HEADERS: the value of entry 1 ('a') is not printable ASCII"),
    ],
)
def test_a_bad_value_is_named_with_its_cure(variable, value, sentence):
    """The sentence names the variable, the value unless it is a secret, and what to write instead."""
    with pytest.raises(ConfigError) as raised:
        settings_for("http://h:4318", **{variable: value}) if variable != "ENDPOINT" else settings_for(value)
    assert f"OTEL_EXPORTER_OTLP_{sentence}" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "pw" not in str(raised.value)


def test_a_header_that_grpc_does_not_know_is_a_bad_setting():
    """HTTP does; gRPC would fail at each request."""
    with pytest.raises(ConfigError, match="_HEADERS: gRPC takes no header 'x!y': use only letters, digits") as raised:
        settings_for("http://h:4317", "grpc", HEADERS="a=b,x!y=secret")
    assert "secret" not in str(raised.value)


def test_an_address_without_a_scheme_is_one_that_grpc_can_dial():
    """It takes a port above the last one for another, and says that nobody answers there."""
    with pytest.raises(ConfigError, match="_ENDPOINT='h:70000' is not a URL"):
        settings_for("u:secret@h:70000", "grpc")


def test_secrets_stay_out_of_the_repr():
    """A log line may show the settings, never a token or a password."""
    settings = settings_for("https://user:secret@h:1/x?key=secret", HEADERS="authorization=Bearer secret", TIMEOUT="2")
    assert repr(settings) == "OtlpSettings('https://h:1/x/v1/traces', http/protobuf, headers: authorization)"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_damaged_certificate_is_a_bad_setting(tmp_path, protocol):
    """It is found when connecting, not taken for a collector that is away."""
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot be used"):
        connect(settings_for("https://127.0.0.1:1", protocol, CERTIFICATE=str(tmp_path / "ca.pem")))


# -- one attempt, real collectors ----------------------------------------------------------------


@pytest.fixture(scope="module", params=["plain", "tls", "mtls"])
def secured(request, tmp_path_factory, certificates) -> Iterator[tuple[servers.Collector, dict[str, str]]]:
    """A collector, and the variables that its clients need."""
    tls, client = {}, {}
    if request.param != "plain":
        tls = {"cert_file": certificates.server, "key_file": certificates.server_key}
        client = {"CERTIFICATE": certificates.authority}
    if request.param == "mtls":
        tls["client_ca_file"] = certificates.authority
        client |= {"CLIENT_CERTIFICATE": certificates.client, "CLIENT_KEY": certificates.client_key}
    with servers.collector(tmp_path_factory.mktemp(request.param), tls) as collector:
        yield collector, client


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_arrive_field_by_field(secured, protocol, compression):
    """Whatever protocol, security and compression, the collector writes down what was sent."""
    collector, client = secured
    number = random.SystemRandom().getrandbits(62) | 1
    request = request_of(number, number + 1)
    with connected(settings_for(endpoint_of(collector, protocol), protocol, COMPRESSION=compression, **client)) as way:
        assert way.send(request.SerializeToString(), 10.0) == ACCEPTED

    key = number.to_bytes(8, "big")
    servers.wait_until(lambda: key in {span.span_id for span in collector.spans()}, what="the span in the file")
    assert traces_with(collector.traces(), key) == TracesData(resource_spans=request.resource_spans)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_cannot_prove_itself_gets_nothing(tmp_path, certificates, protocol):
    """With an authority that did not sign its certificate the request stays here, to be sent when that is mended."""
    other = tmp_path / "other"
    other.mkdir()
    tls = {"cert_file": certificates.server, "key_file": certificates.server_key}
    with servers.collector(tmp_path, tls) as collector:
        stranger = {"CERTIFICATE": make_certificates(other).authority, "TIMEOUT": "2"}
        with connected(settings_for(endpoint_of(collector, protocol), protocol, **stranger)) as way:
            assert way.send(body_of(1), 2.0).verdict is Verdict.RETRY
        assert collector.spans() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_certificates_that_are_renewed_are_read_again(tmp_path, certificates, protocol):
    """Half written at first, then of an authority that the collector does not know, at last the right ones."""
    for name in ("other", "mine"):
        (tmp_path / name).mkdir()
    mine, other = tmp_path / "mine", make_certificates(tmp_path / "other")
    files = {"CLIENT_CERTIFICATE": mine / "client.pem", "CLIENT_KEY": mine / "client_key.pem"}
    for path in files.values():
        path.write_bytes(b"")
    tls = {name: getattr(certificates, of) for name, of in SERVER_FILES.items()}
    with servers.collector(tmp_path, tls) as collector:
        own = {"CERTIFICATE": certificates.authority, **{name: str(path) for name, path in files.items()}}
        settings = settings_for(endpoint_of(collector, protocol), protocol, **own)
        way = Renewed(partial(connect, settings), settings.has_files)
        outcomes = [way.send(body_of(1), 10.0)]
        for signed in (other, certificates):
            for path in files.values():
                copy(signed.folder / path.name, path)
            outcomes.append(way.send(body_of(1), 10.0))
        way.close()

    assert [outcome.verdict.value for outcome in outcomes] == ["retry", "retry", "accepted"]
    assert "cannot be used" in outcomes[0].message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_token_opens_the_collector(tmp_path, protocol, monkeypatch):
    """The header arrives as set, whatever ~/.netrc says; a wrong token is refused for good and said."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with servers.collector(tmp_path, token="t0ken") as collector:
        endpoint = endpoint_of(collector, protocol)
        with connected(settings_for(endpoint, protocol, HEADERS="Authorization=Bearer%20wrong")) as way:
            refused = way.send(body_of(1), 10.0)
        with connected(settings_for(endpoint, protocol, HEADERS="Authorization=Bearer%20t0ken")) as way:
            accepted = way.send(body_of(2), 10.0)
        code = "UNAUTHENTICATED" if protocol == "grpc" else "HTTP 401"
        message = f"{code}: provided authorization does not match expected scheme or token"
        assert (refused, accepted) == (Outcome(Verdict.REFUSED, message=message), ACCEPTED)
        assert ids(collector.wait_for(1)) == {2}


def test_the_certificate_asked_for_wins_over_the_one_of_requests(tmp_path, certificates, monkeypatch):
    """REQUESTS_CA_BUNDLE is for those who name no certificate."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", make_certificates(other).authority)
    with (
        servers.collector(
            tmp_path, {"cert_file": certificates.server, "key_file": certificates.server_key}
        ) as collector,
        connected(settings_for(collector.http, CERTIFICATE=certificates.authority)) as way,
    ):
        assert way.send(body_of(1), 10.0) == ACCEPTED


# -- one attempt, servers that answer as told ------------------------------------------------------


PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        pytest.param((200, PROTOBUF, b""), ACCEPTED, id="accepted"),
        pytest.param((200, {}, b"{}"), ACCEPTED, id="accepted in words that we did not ask in"),
        pytest.param(
            (200, {}, b"<html>"), Outcome(Verdict.ACCEPTED, answered_in="no known type"), id="accepted in other words"
        ),
        pytest.param(
            (200, PROTOBUF, response(3, "too old").SerializeToString()),
            Outcome(Verdict.ACCEPTED, 3, "too old"),
            id="partial success",
        ),
        pytest.param(
            (200, PROTOBUF, response(0, "beware").SerializeToString()),
            Outcome(Verdict.ACCEPTED, 0, "beware"),
            id="warning",
        ),
        pytest.param(
            (429, {"retry-after": "7"}, b"slow down"),
            Outcome(Verdict.RETRY, 0, "HTTP 429: slow down", 7.0),
            id="retry after seconds",
        ),
        pytest.param(
            (503, {"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, b""),
            Outcome(Verdict.RETRY, 0, "HTTP 503: Service Unavailable", 0.0),
            id="retry after a date that is past",
        ),
        pytest.param(
            (503, {"retry-after": "soon"}, b""),
            Outcome(Verdict.RETRY, 0, "HTTP 503: Service Unavailable"),
            id="a wish we do not read",
        ),
        pytest.param(
            (503, PROTOBUF, Status(code=14, message="data refused\n due to memory").SerializeToString()),
            Outcome(Verdict.RETRY, 0, "HTTP 503: data refused due to memory"),
            id="the memory limiter's answer",
        ),
        pytest.param(
            (503, PROTOBUF, b""),
            Outcome(Verdict.RETRY, 0, "HTTP 503: Service Unavailable"),
            id="an answer without words",
        ),
        pytest.param((502, {}, b""), Outcome(Verdict.RETRY, 0, "HTTP 502: Bad Gateway"), id="bad gateway"),
        pytest.param((504, {}, b""), Outcome(Verdict.RETRY, 0, "HTTP 504: Gateway Timeout"), id="gateway timeout"),
        pytest.param(
            (500, {}, b""), Outcome(Verdict.REFUSED, 0, "HTTP 500: Internal Server Error"), id="internal error"
        ),
        pytest.param((400, {}, b"no"), Outcome(Verdict.REFUSED, 0, "HTTP 400: no"), id="bad request"),
        pytest.param(
            (307, {"location": "https://h/"}, b""),
            Outcome(Verdict.REFUSED, 0, "HTTP 307: sent on to https://h/: set the endpoint to that address"),
            id="a redirect is not followed",
        ),
    ],
)
def test_http_answers_mean_what_the_protocol_says(answer, outcome):
    """Only 429, 502, 503 and 504 are tried again, and partial success is never."""
    with http_server(Told(answer)) as endpoint, connected(settings_for(endpoint)) as way:
        assert way.send(b"x", 5.0) == outcome


ECHO = "denied: Bearer s3cr3t-token (a%20pass word) YTphIHBhc3M= key=k3yk3y of demo\x1b]0;mine\x07 \x9b31m"
SHOWN = "denied: ... (... word) ... ... of demo?]0;mine? ?31m"
HEADERS_TOLD = "authorization=Bearer%20s3cr3t-token,x-org=de"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        pytest.param((401, {}, ECHO.encode()), Outcome(Verdict.REFUSED, 0, f"HTTP 401: {SHOWN}"), id="refused"),
        pytest.param(
            (200, PROTOBUF, response(1, ECHO).SerializeToString()), Outcome(Verdict.ACCEPTED, 1, SHOWN), id="partial"
        ),
        pytest.param(
            (307, {"location": "https://a:a%20pass@h/?key=k3yk3y"}, b""),
            Outcome(Verdict.REFUSED, 0, "HTTP 307: sent on to https://a:...@h/?...: set the endpoint to that address"),
            id="redirect",
        ),
        pytest.param(
            (403, {}, b"x" * 280 + b" Bearer s3cr3t-token"),
            Outcome(Verdict.REFUSED, 0, f"HTTP 403: {'x' * 280} ..."),
            id="cut off",
        ),
    ],
)
def test_what_a_server_repeats_of_our_secrets_or_says_to_a_terminal_is_not_told(answer, outcome):
    """Nor is a part of one, where a long answer is cut."""
    with http_server(Told(answer)) as endpoint:
        url = endpoint.replace("//", "//a:a%20pass@") + "/v1/traces?key=k3yk3y"
        env = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_EXPORTER_OTLP_HEADERS": HEADERS_TOLD}
        settings = OtlpSettings.from_env(env)
        assert settings is not None
        with connected(settings) as way:
            assert way.send(b"x", 5.0) == outcome


def test_what_a_grpc_server_repeats_of_our_secrets_is_not_told():
    """As over HTTP."""
    denied = (grpc.StatusCode.UNAUTHENTICATED, "no Bearer s3cr3t-token, nor s3cr3t-token, of demo", None)
    with (
        grpc_server(Told(denied)) as endpoint,
        connected(settings_for(endpoint, "grpc", HEADERS=HEADERS_TOLD)) as way,
    ):
        assert way.send(b"", 5.0).message == "UNAUTHENTICATED: no ..., nor ..., of demo"


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        pytest.param(
            "http:///", "Please check proxy URL. It is malformed and could be missing the host.", id="no host"
        ),
        pytest.param("ftp://h", "Proxy URL had unsupported scheme ftp, should use http:// or https://", id="no proxy"),
        pytest.param("socks5://h", "Missing dependencies for SOCKS support.", id="no PySocks"),
    ],
)
def test_what_a_bad_proxy_keeps_from_the_collector_waits(proxy, said):
    """No server has refused it; the sentence says what to mend."""
    program = (
        "import os, sys\n"
        "sys.modules['socks'] = None\n"  # as where PySocks is not installed
        "from otel_dltrace.export.otlp.settings import OtlpSettings\n"
        "from otel_dltrace.export.otlp.transport import connect\n"
        "outcome = connect(OtlpSettings.from_env(os.environ)).send(b'x', 5.0)\n"
        "print(outcome.verdict.value, outcome.message)\n"
    )
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4318", "HTTP_PROXY": proxy}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)

    assert done.stdout == f"retry {said}\n"
    assert "correct HTTP_PROXY" in diagnose(settings_for("http://collector.example:4318"), said).cure


def test_an_answer_of_any_length_takes_little_memory():
    """At a wrong address there may be a server of large files."""
    told = Told((503, {}, b"x" * (64 << 20)))
    with http_server(told) as endpoint, connected(settings_for(endpoint)) as way:
        tracemalloc.start()
        outcome = way.send(b"x", 30.0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert outcome == Outcome(Verdict.RETRY, 0, f"HTTP 503: {'x' * 138}...{'x' * 148}")
    assert peak < 32 << 20


@contextmanager
def begun_answer(drip_s=None):
    """Begin to answer the first request: a byte each *drip_s* seconds, with None one byte and the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n\0")
                while drip_s is not None:
                    time.sleep(drip_s)
                    connection.sendall(b"\0")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for():
    """Each byte is in time, and all of them would take ten seconds."""
    with begun_answer(0.1) as endpoint, connected(settings_for(endpoint)) as way:
        since = time.monotonic()
        outcome = way.send(b"x", 0.5)
        lasted = time.monotonic() - since
        assert diagnose(settings_for(endpoint), outcome.message).what == f"{endpoint}/v1/traces does not answer in time"
    assert outcome.verdict is Verdict.RETRY
    assert 0.5 <= lasted < 5


def test_a_connection_that_is_cut_within_the_answer_is_told_in_words():
    """Whether the spans were taken is not known: they wait."""
    with begun_answer() as endpoint, connected(settings_for(endpoint)) as way:
        outcome = way.send(b"x", 5.0)
        told = diagnose(settings_for(endpoint), outcome.message)
    assert outcome.verdict is Verdict.RETRY
    assert told.what == f"{endpoint}/v1/traces hangs up in the middle of its answer"


def test_a_date_in_retry_after_is_a_number_of_seconds_from_now():
    """The HTTP form that proxies like."""
    answer = (429, {"retry-after": formatdate(time.time() + 100, usegmt=True)}, b"")
    with http_server(Told(answer)) as endpoint, connected(settings_for(endpoint)) as way:
        wish = way.send(b"x", 5.0).retry_after_s
    assert wish == pytest.approx(99, abs=10)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        pytest.param(response(0, ""), ACCEPTED, id="accepted"),
        pytest.param(response(3, "too old"), Outcome(Verdict.ACCEPTED, 3, "too old"), id="partial success"),
        *(
            pytest.param((code, "m", None), Outcome(Verdict.RETRY, 0, f"{code.name}: m"), id=code.name)
            for code in (
                grpc.StatusCode.CANCELLED,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.ABORTED,
                grpc.StatusCode.OUT_OF_RANGE,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DATA_LOSS,
            )
        ),
        *(
            pytest.param((code, "m", None), Outcome(Verdict.REFUSED, 0, f"{code.name}: m"), id=code.name)
            for code in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.INTERNAL,
                grpc.StatusCode.UNIMPLEMENTED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        ),
        pytest.param(
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", 1.5),
            Outcome(Verdict.RETRY, 0, "RESOURCE_EXHAUSTED: busy", 1.5),
            id="exhausted, with a way out",
        ),
        pytest.param(
            (grpc.StatusCode.UNAVAILABLE, "busy", 1e9),
            Outcome(Verdict.RETRY, 0, "UNAVAILABLE: busy", 3600.0),
            id="a wish beyond reason",
        ),
    ],
)
def test_grpc_answers_mean_what_the_protocol_says(answer, outcome):
    """The retryable codes are tried again, an exhausted server only if it says when."""
    with grpc_server(Told(answer)) as endpoint, connected(settings_for(endpoint, "grpc")) as way:
        assert way.send(b"", 5.0) == outcome


def test_headers_and_bytes_arrive_as_they_are():
    """The body on the wire is the body that was given, over both protocols."""
    http, grpc_told = Told((200, {}, b"")), Told(response(0, ""))
    body = body_of(1, 2)
    with http_server(http) as endpoint, connected(settings_for(endpoint)) as way:
        way.send(body, 5.0)
    with grpc_server(grpc_told) as endpoint, connected(settings_for(endpoint, "grpc")) as way:
        way.send(body, 5.0)
    assert (http.bodies, grpc_told.bodies) == ([body], [body])


def user_timeouts(port: str) -> list[int]:
    """Return for how many ms the kernel lets this process's connections to *port* go unacknowledged; 0: for long."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  -- numbers, not paths
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[1:2] == (int(port),):
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


def test_a_host_that_is_gone_is_given_up_soon_over_grpc():
    """It sends no end, and the kernel would go on for 15 min; pings that a collector takes amiss are not needed."""
    with grpc_server(Told(response(0, ""))) as endpoint, connected(settings_for(endpoint, "grpc")) as way:
        assert way.send(b"", 5.0) == ACCEPTED
        assert user_timeouts(endpoint.rpartition(":")[2]) == [20_000]


def test_an_address_where_nothing_listens_does_not_hide_what_another_says():
    """As of localhost, where ::1 refuses; gRPC tells of either, as it comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.2", 0)) as gone:
        here, nowhere = listener.getsockname()[1], gone.getsockname()[1]
        gone.close()
        threading.Thread(target=hang_up_on_all, args=[listener], daemon=True).start()
        addresses = f"ipv4:127.0.0.2:{nowhere},127.0.0.1:{here}"
        with connected(settings_for(addresses, "grpc")) as way:
            said = [way.send(b"", 5.0).message for _ in range(6) if not time.sleep(0.3)]
        listener.shutdown(socket.SHUT_RDWR)

    assert [message for message in said if f"127.0.0.1:{here}" not in message] == []


def of_address(address, why):
    """Return what gRPC says of a request when *address* is the one that it tried last."""
    return Outcome(Verdict.RETRY, message=f"UNAVAILABLE: failed to connect; last error: UNKNOWN: {address}: {why}")


def test_what_an_address_said_that_has_ended_hides_no_refusal():
    """It was told until a request got through, with the cure for that, as of a collector that was stopped."""
    refusal = of_address("ipv6:%5B::1%5D:4317", "Connection refused")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hangs_up = of_address(f"ipv4:127.0.0.1:{listener.getsockname()[1]}", "Socket closed")
        addresses = _Addresses()
        addresses.telling(hangs_up)
        while_it_listens = addresses.telling(refusal)

    assert (while_it_listens, addresses.telling(refusal)) == (hangs_up, refusal)


def test_what_is_no_address_costs_no_request():
    """It is told as gRPC does."""
    addresses, odd = _Addresses(), of_address("ipv4:127.0.0.1:http", "Socket closed")
    addresses.telling(odd)

    assert addresses.telling(of_address("ipv4:127.0.0.2:4317", "Connection refused")) == odd


def hang_up_on_all(listener):
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


@contextmanager
def byte_counter(seen, greeting):
    """Listen, greet the first connection, count what it brings until its end, and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def count():
            with listener.accept()[0] as connection, suppress(ConnectionResetError):  # of a greeting that nobody reads
                connection.sendall(greeting)
                while data := connection.recv(1 << 16):
                    seen.append(len(data))

        thread = threading.Thread(target=count)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with socket.create_connection(listener.getsockname()) as late:  # a client that never came is not waited for
            late.shutdown(socket.SHUT_WR)
            thread.join()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_gzip_makes_the_request_smaller_on_the_wire(protocol):
    """Sixty KB that repeat themselves travel as a few."""
    size, enough = {}, {"none": 60_000, "gzip": 100}
    greeting = b"\0\0\0\4\0\0\0\0\0" if protocol == "grpc" else b""  # a client of HTTP/2 waits for settings
    for compression in ("none", "gzip"):
        for patience in (0.3, 3.0, 20.0):  # nobody answers, so all of it is waited
            seen = []
            with (
                byte_counter(seen, greeting) as endpoint,
                connected(settings_for(endpoint, protocol, COMPRESSION=compression)) as way,
            ):
                way.send(b"x" * 60_000, patience)
            size[compression] = sum(seen)
            if size[compression] > enough[compression]:
                break
    assert 100 < size["gzip"] < 3_000
    assert size["none"] > 60_000


# -- the sender ----------------------------------------------------------------------------------


@contextmanager
def black_hole():
    """Listen, let everybody in, and never say a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def spill(tmp_path):
    return tmp_path / "spill"


def sender_to(endpoint, spill, protocol="http/protobuf", **limits):
    return Sender(connect(settings_for(endpoint, protocol)), lambda: spill, **limits)


def spilled_ids(spill):
    """Return the ids of the spans in the spill folder, file by file."""
    found = []
    for path in sorted(spill.glob("*")):
        request = ExportTraceServiceRequest.FromString(path.read_bytes())
        spans = servers.spans_of(TracesData(resource_spans=request.resource_spans))
        assert path.name == f"{len(found):08d}-{len(spans):04d}.otlp"
        found.append(sorted(ids(spans)))
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_dies_and_returns_gets_every_span(tmp_path, spill, protocol):
    """Killed in the middle and started again, it has each span; what it missed waited on disk."""
    with servers.collector(tmp_path) as collector:
        sender = sender_to(endpoint_of(collector, protocol), spill, protocol)
        for number in range(1, 101):
            sender.submit(body_of(2 * number, 2 * number + 1), 2, number)
            if number == 40:
                collector.wait_for(60)
                collector.kill()
        servers.wait_until(lambda: not sender.pending(), what="everything delivered or on disk")
        assert sender.delivery().spilled >= 120
        collector.start()
        spans = collector.wait_for(200)
        delivery = sender.close(5.0)
    assert ids(spans) == set(range(2, 202))
    assert delivery == Delivery(accepted=200, trouble=delivery.trouble)
    assert delivery.trouble
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_black_hole_delays_the_end_no_longer_than_asked(tmp_path, spill, protocol):
    """A collector that never answers costs the time allowed; all is on disk, and `resend` delivers it."""
    with black_hole() as endpoint:
        sender = sender_to(endpoint, spill, protocol)
        for number in range(1, 6):
            sender.submit(body_of(number), 1, "tag")
        start = time.monotonic()
        delivery = sender.close(0.5)
        took = time.monotonic() - start
    assert took < 8  # 0.5 as asked, the rest for a busy machine; one attempt alone may take 10
    assert delivery == Delivery(spilled=5, trouble=delivery.trouble)
    assert delivery.trouble
    assert sorted(spilled_ids(spill)) == [[1], [2], [3], [4], [5]]

    with servers.collector(tmp_path) as collector:
        settings = settings_for(endpoint_of(collector, protocol), protocol)
        assert resend(connect(settings), spill) == Delivery(accepted=5)
        assert ids(collector.wait_for(5)) == {1, 2, 3, 4, 5}
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_program_ends_although_its_collector_hangs(spill, protocol):
    """An attempt that is still under way does not keep the process alive, nor does it crash its end."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from otel_dltrace.export.otlp.sender import Sender\n"
        "from otel_dltrace.export.otlp.settings import OtlpSettings\n"
        "from otel_dltrace.export.otlp.transport import connect\n"
        "import os\n"
        "sender = Sender(connect(OtlpSettings.from_env(os.environ)), lambda: Path(sys.argv[1]))\n"
        "sender.submit(b'abc', 7, 'tag')\n"
        "print(sender.close(0.3).spilled)\n"
    )
    with black_hole() as endpoint:
        env = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        result = subprocess.run(
            [sys.executable, "-c", program, spill], env=env, capture_output=True, text=True, timeout=240, check=False
        )
    assert (result.returncode, result.stdout) == (0, "7\n")
    assert [line for line in result.stderr.splitlines() if not line.startswith("otel_dltrace: ")] == []


def test_a_collector_that_is_not_there_leaves_all_on_disk(spill):
    """Refused connections: everything is spilled, in order, and the reason is kept."""
    sender = sender_to(f"http://127.0.0.1:{servers.free_port()}", spill)
    for number in range(1, 4):
        sender.submit(body_of(number), 1, number)
    servers.wait_until(lambda: not sender.pending(), what="all requests on disk")
    delivery = sender.close(0.2)
    assert delivery == Delivery(spilled=3, trouble=delivery.trouble)
    assert delivery.trouble.endswith("Connection refused")
    assert len(delivery.trouble) < 150
    assert spilled_ids(spill) == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("serve", "busy", "fine"),
    [
        pytest.param(http_server, (429, {"retry-after": "1"}, b""), (200, {}, b""), id="Retry-After"),
        pytest.param(
            grpc_server, (grpc.StatusCode.RESOURCE_EXHAUSTED, "", 1.0), response(2, "two are too old"), id="RetryInfo"
        ),
    ],
)
def test_a_busy_collector_is_left_alone_for_as_long_as_it_asks(spill, serve, busy, fine):
    """The second attempt comes after the wish, with the same bytes; rejected spans are counted, not sent again."""
    told = Told(busy, fine)
    with serve(told) as endpoint:
        sender = sender_to(endpoint, spill, "grpc" if serve is grpc_server else "http/protobuf")
        sender.submit(body_of(1, 2, 3), 3, "tag")
        servers.wait_until(lambda: len(told.times) == 2, what="the second attempt")
        delivery = sender.close(5.0)
    assert told.times[1] - told.times[0] >= 1.0
    assert told.bodies[0] == told.bodies[1]
    rejected = 2 if serve is grpc_server else 0
    rejection = "two are too old" if rejected else ""
    assert delivery == Delivery(3 - rejected, rejected, rejection, trouble=delivery.trouble)


def test_after_a_failure_the_oldest_is_still_the_first(spill):
    """A request that failed keeps its place before those that came later, in memory and on disk."""
    busy = (grpc.StatusCode.UNAVAILABLE, "busy", 0.05)
    told = Told(busy, busy, response(0, ""))
    with grpc_server(told) as endpoint:
        sender = sender_to(endpoint, spill, "grpc")
        for number in (1, 2, 3):
            sender.submit(bytes([number]), 1, number)
        delivery = sender.close(10.0)
    assert told.bodies == [b"\x01", b"\x01", b"\x01", b"\x02", b"\x03"]
    assert delivery == Delivery(accepted=3, trouble="UNAVAILABLE: busy")


def test_what_is_refused_is_dropped_and_the_next_is_sent(spill):
    """A request that the collector cannot take is counted with its words; it does not stand in the way."""
    told = Told((400, {}, b"broken"), (200, {}, b""))
    with http_server(told) as endpoint:
        sender = sender_to(endpoint, spill)
        sender.submit(b"bad", 5, "a")
        sender.submit(body_of(1), 1, "b")
        delivery = sender.close(5.0)
    assert delivery == Delivery(accepted=1, dropped={REFUSED: 5}, trouble="HTTP 400: broken")
    assert sender.pending() == frozenset()


def test_refusals_in_other_words_each_time_are_told_once(spill, monkeypatch, capfd):
    """The drain's log is in memory, and nobody cuts it."""
    monkeypatch.setattr(guard, "_said", set())
    told = Told(*((400, {}, f"request {number}".encode()) for number in range(3)), (403, {}, b"no"))
    with http_server(told) as endpoint:
        sender = sender_to(endpoint, spill)
        for number in range(4):
            sender.submit(b"bad", 1, number)
        delivery = sender.close(5.0)
    assert delivery == Delivery(dropped={REFUSED: 4}, trouble="HTTP 403: no")
    assert capfd.readouterr().err.splitlines() == [
        f"otel_dltrace: the collector refuses spans ({why})" for why in ("HTTP 400: request 0", "HTTP 403: no")
    ]


def test_memory_and_disk_are_bounded_and_the_oldest_go_first(spill):
    """Above the memory's limit requests go to disk at once, above the disk's the oldest are dropped and counted."""
    with black_hole() as endpoint:
        sender = sender_to(endpoint, spill, memory_limit=100, spill_limit=100)
        for number in range(10):
            sender.submit(bytes([number]) * 40, 1, number)
        in_memory = sender.pending()
        delivery = sender.close(0.0)
    assert in_memory == {0, 1}
    assert delivery == Delivery(spilled=2, dropped={SPILL_FULL: 8}, trouble=delivery.trouble)
    assert len(list(spill.iterdir())) == 2


def test_spans_that_made_room_for_one_that_found_none_are_counted(spill):
    """The disk is full when the oldest are gone already."""
    with black_hole() as endpoint:
        sender = sender_to(endpoint, spill, memory_limit=0, spill_limit=100)
        for number in range(2):
            sender.submit(bytes([number]) * 40, 1, number)
        with room_for(10):
            sender.submit(b"x" * 40, 1, 2)
        delivery = sender.close(0.0)
    assert delivery == Delivery(spilled=1, dropped={SPILL_FULL: 1, NO_ROOM: 1}, trouble=delivery.trouble)


def test_a_file_that_cannot_be_read_for_a_while_is_sent_later(spill):
    """It is on disk, and not lost; what comes meanwhile does not wait for it."""
    Spill(spill).put(body_of(1), 1)
    (file,) = spill.iterdir()
    told = Told((503, {"retry-after": "2"}, b""), (200, {}, b""))
    with http_server(told) as endpoint:
        sender = sender_to(endpoint, spill)
        servers.wait_until(lambda: sender.delivery().trouble, what="the first attempt")
        away, bad = spill.parent / "away", spill.parent / "bad"
        away.hardlink_to(file)
        bad.symlink_to(spill)
        bad.replace(file)  # in one go, as below: a file that is gone for a moment is gone
        sender.submit(body_of(2), 1, "new")
        servers.wait_until(lambda: sender.delivery().accepted, what="the other one's arrival")
        meanwhile = sender.delivery()
        away.replace(file)
        servers.wait_until(lambda: len(told.bodies) == 3, what="the file to be sent")
        delivery = sender.close(5.0)
    assert replace(meanwhile, trouble="") == Delivery(accepted=1, spilled=1)
    assert replace(delivery, trouble="") == Delivery(accepted=2)


def test_until_a_folder_is_known_requests_stay_in_memory(spill):
    """A collector that is away and no folder: they wait; once there is a folder they move."""
    known = []
    endpoint = f"http://127.0.0.1:{servers.free_port()}"
    sender = Sender(connect(settings_for(endpoint)), lambda: known[0] if known else None)
    sender.submit(body_of(1), 1, "a")
    servers.wait_until(lambda: sender.delivery().trouble, what="the first failure")
    assert (sender.pending(), sender.delivery().waiting) == ({"a"}, 1)
    known.append(spill)
    sender.submit(body_of(2), 1, "b")
    servers.wait_until(lambda: not sender.pending(), what="both on disk")
    assert sender.close(0.0).spilled == 2
    assert spilled_ids(spill) == [[1], [2]]


@pytest.mark.parametrize("blocked", [False, True], ids=["no folder", "a folder that cannot be made"])
def test_spans_that_find_no_place_are_counted(tmp_path, blocked):
    """At the end, without a place on disk, what did not get through is named as lost."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "spill" if blocked else None
    sender = sender_to(f"http://127.0.0.1:{servers.free_port()}", folder)
    sender.submit(body_of(1, 2), 2, "a")
    delivery = sender.close(0.3)
    assert delivery == Delivery(dropped={NO_ROOM: 2}, trouble=delivery.trouble)
    assert sender.pending() == frozenset()


def test_what_an_earlier_process_left_is_sent_oldest_first(spill):
    """Whole files are sent in their order, before anything new; half a file of a killed writer is not."""
    for number in (1, 2):
        Spill(spill).put(body_of(number), 1)
    (spill / "00000002-0009.otlp.partial").write_bytes(b"half")
    (spill / "README").write_text("not ours")
    told = Told((200, {}, b""))
    with http_server(told) as endpoint:
        sender = sender_to(endpoint, spill)
        sender.submit(body_of(3), 1, "new")
        delivery = sender.close(5.0)
    assert delivery == Delivery(accepted=3)
    assert [ids(spans_in(body)) for body in told.bodies] == [{1}, {2}, {3}]
    assert [path.name for path in spill.iterdir()] == ["README"]


def spans_in(body):
    return servers.spans_of(TracesData(resource_spans=ExportTraceServiceRequest.FromString(body).resource_spans))


def test_resend_gives_up_when_nothing_gets_through(spill):
    """A collector that stays away costs the patience asked for, and no request."""
    Spill(spill).put(body_of(1, 2), 2)
    seen = []
    transport = connect(settings_for(f"http://127.0.0.1:{servers.free_port()}"))
    delivery = resend(transport, spill, patience_s=0.3, progress=seen.append)
    assert delivery == Delivery(spilled=2, trouble=delivery.trouble)
    assert seen[-1].spilled == 2
    assert spilled_ids(spill) == [[1, 2]]


class Slow(Told):
    """Answers late."""

    def next(self, body):
        """Note the request, and return what to answer after a while."""
        answer = super().next(body)
        time.sleep(2.5)
        return answer


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(Slow((200, {}, b"")), id="slow"),
        pytest.param(Told((503, {"retry-after": "2"}, b""), (200, {}, b"")), id="busy"),
    ],
)
def test_resend_goes_on_while_an_answer_is_on_its_way(spill, told):
    """And until a busy collector wants to be asked again; who gave up would send the same once more the next time."""
    Spill(spill).put(body_of(1, 2), 2)
    with http_server(told) as endpoint:
        delivery = resend(connect(settings_for(endpoint)), spill, patience_s=1.0)
    assert replace(delivery, trouble="") == Delivery(accepted=2)
    assert list(spill.iterdir()) == []


def test_resend_does_not_wait_for_a_collector_that_wants_nothing_for_an_hour(spill):
    """Nothing is under way meanwhile."""
    Spill(spill).put(body_of(1, 2), 2)
    with http_server(Told((503, {"retry-after": "3600"}, b""))) as endpoint:
        delivery = resend(connect(settings_for(endpoint)), spill, patience_s=0.3)
    assert replace(delivery, trouble="") == Delivery(spilled=2)


@given(failures=st.integers(1, 10_000), wish=st.none() | st.floats(0, 3600), seed=st.integers())
def test_pauses_stay_in_their_bounds(failures, wish, seed):
    """Without a wish 0.5 to 30 s, at most a second after the first failure; with one never less than asked."""
    pause = pause_s(failures, wish, random.Random(seed))
    if wish:
        assert wish <= pause <= 1.1 * wish
    else:
        assert 0.5 <= pause <= min(30, 2 ** (failures - 1) if failures < 9 else 30)


# -- the first real configuration ----------------------------------------------------------------


def test_the_standalone_configuration_is_valid():
    """The collector itself says so, with the defaults and nothing set."""
    config = ROOT / "collector-config" / "standalone.yaml"
    result = subprocess.run(
        [servers.program("otelcol"), "validate", "--config", config], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_standalone_configuration_carries_spans_to_its_file_and_to_jaeger(tmp_path, spill):
    """What went in stands in the file and in Jaeger's answer, field by field; the health check says ready."""
    trace = random.SystemRandom().getrandbits(127) | 1 << 127
    request = request_of(1, 2, 3, trace=trace)
    sent = TracesData(resource_spans=request.resource_spans)
    with servers.jaeger(tmp_path) as jaeger, servers.standalone(tmp_path, jaeger.grpc) as collector:
        with urllib.request.urlopen(f"http://{collector.env['HEALTH_ENDPOINT']}", timeout=10) as answer:
            assert answer.status == 200
        sender = sender_to(collector.grpc, spill, "grpc")
        sender.submit(request.SerializeToString(), 3, 0)
        assert sender.close(10.0) == Delivery(accepted=3)
        collector.wait_for(3)
        assert collector.traces() == sent
        assert jaeger.trace(f"{trace:032x}", 3) == sent
        assert jaeger.get("/api/services")["data"] == ["job"]


def test_the_standalone_configuration_keeps_the_file_without_a_jaeger(tmp_path, spill):
    """Jaeger's absence is not the sender's trouble."""
    with servers.standalone(tmp_path, f"127.0.0.1:{servers.free_port()}") as collector:
        sender = sender_to(collector.http, spill)
        for number in range(1, 21):
            sender.submit(body_of(number), 1, number)
        assert sender.close(10.0) == Delivery(accepted=20)
        assert ids(collector.wait_for(20)) == set(range(1, 21))
