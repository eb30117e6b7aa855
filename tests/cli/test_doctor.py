"""`otel-dltrace doctor`, and the last line of a run, name what is wrong with a collector; the training goes on."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from otel_dltrace.doctor import endpoint, environment, frameworks, host, installation, runs
from otel_dltrace.doctor.checks import examine
from otel_dltrace.doctor.child import Child
from otel_dltrace.export.otlp.diagnosis import diagnose
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding, worst
from otel_dltrace.settings.config import Config
from tests.support import servers
from tests.support.processes import a_place, waiting
from tests.support.told import Told, grpc_server, http_server, response

PROTOBUF = {"content-type": "application/x-protobuf"}
STEPS = """
import otel_dltrace
for number in range(3):
    with otel_dltrace.step():
        pass
print("trained")
"""
TOKEN = "authorization=Bearer%20"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Run a real collector that wants a token."""
    with servers.collector(tmp_path_factory.mktemp("guarded"), token="t0ken") as collector:
        yield collector


@pytest.fixture(scope="module")
def secured(tmp_path_factory, certificates):
    """Run a real collector behind TLS."""
    tls = {"cert_file": certificates.server, "key_file": certificates.server_key}
    with servers.collector(tmp_path_factory.mktemp("secured"), tls) as collector:
        yield collector


@dataclass(frozen=True)
class Addresses:
    """Where requests can go."""

    guarded: servers.Collector
    secured: servers.Collector
    nowhere: str


@pytest.fixture
def at(guarded, secured) -> Addresses:
    """Give both collectors, and an address at which nobody listens."""
    return Addresses(guarded, secured, f"http://127.0.0.1:{servers.free_port()}")


def otlp(where: str, protocol: str = "http/protobuf", **more: str) -> dict[str, str]:
    """Return the variables that send to *where*."""
    env = {"ENDPOINT": where, "PROTOCOL": protocol, **more}
    return {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in env.items()}


def plain(url: str) -> str:
    return url.replace("https://", "http://")


REAL = [
    pytest.param(
        lambda at: otlp(at.nowhere),
        "nothing listens at", "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT",
        id="absent",
    ),
    pytest.param(
        lambda at: otlp(at.nowhere, "grpc"),
        "nothing listens at", "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT",
        id="absent, gRPC",
    ),
    pytest.param(
        lambda at: otlp(at.guarded.grpc, HEADERS=f"{TOKEN}t0ken"),
        "hangs up on HTTP, as a gRPC port does", "set OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
        id="HTTP to the gRPC port",
    ),
    pytest.param(
        lambda at: otlp(at.guarded.http, "grpc", HEADERS=f"{TOKEN}t0ken"),
        "speaks HTTP, and not gRPC", "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
        id="gRPC to the HTTP port",
    ),
    pytest.param(
        lambda at: otlp(at.secured.http),
        "is signed by nobody we trust", "name the PEM file of its authority in OTEL_EXPORTER_OTLP_CERTIFICATE",
        id="self-signed",
    ),
    pytest.param(
        lambda at: otlp(at.secured.grpc, "grpc"),
        "is signed by nobody we trust", "name the PEM file of its authority in OTEL_EXPORTER_OTLP_CERTIFICATE",
        id="self-signed, gRPC",
    ),
    pytest.param(
        lambda at: otlp(plain(at.secured.http)), "speaks TLS", "https:// in OTEL_EXPORTER_OTLP_ENDPOINT",
        id="plain to TLS",
    ),
    pytest.param(
        lambda at: otlp(at.guarded.http.replace("http:", "https:"), HEADERS=f"{TOKEN}t0ken"),
        "speaks no TLS", "write http:// in OTEL_EXPORTER_OTLP_ENDPOINT",
        id="TLS to plain",
    ),
    pytest.param(
        lambda at: otlp(at.guarded.http, HEADERS=f"{TOKEN}wrong"),
        "does not accept our token (HTTP 401", "correct it in OTEL_EXPORTER_OTLP_HEADERS",
        id="wrong token",
    ),
    pytest.param(
        lambda at: otlp(at.guarded.grpc, "grpc"),
        "wants a token, and we send none (UNAUTHENTICATED", "in OTEL_EXPORTER_OTLP_HEADERS",
        id="no token, gRPC",
    ),
    pytest.param(
        lambda at: {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{at.guarded.http}/traces", **otlp("", HEADERS=f"{TOKEN}t0ken")
        },
        "is not an OTLP receiver (HTTP 404", "correct the port or path in OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        id="wrong path",
    ),
]  # fmt: skip

TOLD = [
    pytest.param(http_server, (413, {}, b"too large"), "finds a request too large (HTTP 413", "max_request_body_size",
                 id="413"),
    pytest.param(http_server, (429, {"retry-after": "60"}, b"slow down"), "asks for less (HTTP 429", "more capacity",
                 id="429"),
    pytest.param(http_server, (503, {}, b"memory"), "takes no spans for now (HTTP 503", "see the collector's log",
                 id="503"),
    pytest.param(http_server, (200, PROTOBUF, response(2, "too old").SerializeToString()), "too old", "",
                 id="partial success"),
    pytest.param(grpc_server, response(2, "too old"), "too old", "", id="partial success, gRPC"),
]  # fmt: skip


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict == PROBLEM]


@pytest.mark.parametrize(("env", "what", "cure"), REAL)
def test_the_doctor_says_what_is_wrong_with_a_real_collector(env, what, cure, at):
    """One problem for the endpoint, one sentence, and what to do about it."""
    *_, found = problems(endpoint.check(env(at)))

    assert (what in found.what, cure in found.cure) == (True, True), found


@contextmanager
def answering(serve, answer):
    with serve(Told(answer)) as where:
        yield otlp(where, "grpc" if serve is grpc_server else "http/protobuf")


@pytest.mark.parametrize(("serve", "answer", "what", "cure"), TOLD)
def test_the_doctor_says_what_a_collector_answers(serve, answer, what, cure):
    """Too large, too much, not now, not all."""
    with answering(serve, answer) as env:
        (found,) = problems(endpoint.check(env))

    assert (what in found.what, cure in found.cure) == (True, True), found


@pytest.mark.parametrize(
    ("env", "says"),
    [
        pytest.param({}, "no endpoint is set", id="no endpoint"),
        pytest.param({"OTEL_TRACES_EXPORTER": "none", **otlp("http://h")}, "leaves OTLP out", id="another exporter"),
    ],
)
def test_nothing_is_sent_where_nothing_is_asked_for(env, says):
    """Without a problem, and without a request."""
    (found,) = endpoint.check(env)

    assert (found.verdict, says in found.what) == (FINE, True)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param("text/html; charset=utf-8", b"<html>", id="a page"),
        pytest.param("application/json", b'{"status":"Server available"}', id="a collector's health"),
    ],
)
def test_a_server_that_says_yes_to_all_is_no_collector(kind, body):
    """A web page is no answer of OTLP."""
    with answering(http_server, (200, {"content-type": kind}, body)) as env:
        (found,) = problems(endpoint.check(env))

    assert f"says yes in {kind.partition(';')[0]}, which is not an answer of OTLP" in found.what


@pytest.mark.parametrize(
    ("kind", "body", "verdict", "says"),
    [
        pytest.param("application/json", b'{"partialSuccess":{}}', FINE, "answers OTLP over", id="JSON"),
        pytest.param(
            "application/x-protobuf",
            response(0, "we move in May").SerializeToString(),
            NOTE,
            "and says: we move in May",
            id="a warning",
        ),
    ],
)
def test_an_answer_that_takes_all_is_no_problem(kind, body, verdict, says):
    """A collector may answer in the other encoding, and say more than yes."""
    with answering(http_server, (200, {"content-type": kind}, body)) as env:
        (found,) = endpoint.check(env)

    assert (found.verdict, says in found.what) == (verdict, True)


def test_frameworks_whose_import_hangs_hold_up_one_another_for_no_longer_than_one(monkeypatch):
    """Most of them import torch: minutes for each would be many."""
    together = threading.Barrier(3)

    def ask(_code, _env):
        together.wait(60)
        return Child(None, "no answer after 120 s", "")

    monkeypatch.setattr(frameworks.Child, "ask", ask)
    found = frameworks._frameworks(["accelerate", "lightning", "torch"], import_them=True)

    assert [one.verdict for one in found] == [PROBLEM] * 3
    assert [one.what.split()[0] for one in found] == ["accelerate", "lightning", "torch"]


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_answers_is_fine(protocol, compression, secured, certificates):
    """The certificate is told with its end, and the answer with its protocol; an empty request is packed as any."""
    where = secured.grpc if protocol == "grpc" else secured.http
    env = otlp(where, protocol, CERTIFICATE=certificates.authority, COMPRESSION=compression)
    chain, answered = endpoint.check(env)

    assert (chain.area, chain.verdict, answered.verdict) == ("TLS", NOTE, FINE)  # it is good for a day
    assert "server, signed by authority, is good until " in chain.what
    assert f" answers OTLP over {protocol} (" in answered.what


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_what_answers_is_asked_for_by_the_variable_that_counts(secured, certificates, protocol):
    """The common one would change nothing."""
    other, where = ("http/protobuf", secured.http) if protocol == "grpc" else ("grpc", secured.grpc)
    own = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol, **otlp(where, CERTIFICATE=certificates.authority)}
    (found,) = problems(endpoint.check(own))

    assert found.cure == f"set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={other}: that gets an answer"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_where_metrics_go_by_variables_of_their_own_is_asked_too(at, protocol):
    """Spans arrive, and metrics do not: a collector that is fine does not speak for the other one."""
    fine = at.secured.grpc if protocol == "grpc" else at.secured.http
    own = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": at.nowhere, "OTEL_TRACES_EXPORTER": "none"}
    (_, found) = endpoint.check({**otlp(fine, protocol), **own})

    where = at.nowhere.removeprefix("http://") if protocol == "grpc" else f"{at.nowhere}/"
    cure = "start the collector, or correct OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
    assert found == Finding("metrics endpoint", PROBLEM, f"nothing listens at {where}", cure)


def test_how_metrics_are_counted_is_no_way_of_their_own(at):
    """Else a collector for spans alone, which is fine, would be asked for them."""
    told = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}
    assert [found.area for found in endpoint.check({**otlp(at.nowhere, "grpc"), **told})] == [endpoint.AREA]


@pytest.mark.parametrize(
    "said", ["unknown service opentelemetry.proto.collector.trace.v1.TraceService", "Method not found!"]
)
def test_a_grpc_server_that_knows_no_otlp_is_told_as_one(said):
    """As Jaeger's for queries, and one in Python; it was said to speak no gRPC."""
    said = f"UNIMPLEMENTED: {said}"
    assert str(diagnose(OtlpSettings.from_env(otlp("http://a:1", "grpc")), said)) == (
        f"a:1 has no such OTLP service ({said}): correct the port in OTEL_EXPORTER_OTLP_ENDPOINT"
    )


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("error", [errno.EHOSTUNREACH, errno.ENETUNREACH], ids=errno.errorcode.get)
def test_a_host_that_no_way_leads_to_is_not_asked_for_its_log(protocol, error):
    """The collector knows nothing of it: the host is down, or a firewall rejects."""
    why = os.strerror(error)
    said = {
        "grpc": f"UNAVAILABLE: failed to connect to all addresses; last error: ipv4:10.0.0.3:1: {why}",
        "http/protobuf": f"HTTPConnection(host='a', port=1): Failed to establish a new connection: {why}",
    }
    settings = OtlpSettings.from_env(otlp("http://a:1", protocol))

    assert str(diagnose(settings, said[protocol])) == (
        f"there is no way from this host to {settings.where}: see whether its host is up, and what the firewalls "
        "between let through, or correct OTEL_EXPORTER_OTLP_ENDPOINT"
    )


def test_the_variable_that_counts_is_the_one_to_correct():
    """Where traces have one of their own, the common one says nothing."""
    own = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2/path"}
    cures = [diagnose(OtlpSettings.from_env(dict(list(own.items())[:n])), "Connection refused").cure for n in (1, 2)]

    assert cures == [f"start the collector, or correct {name}" for name in own]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param(
            "[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired",
            "https://a/v1/traces does not accept our certificate, which has expired: "
            "renew what OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY name",
            id="ours has expired",
        ),
        pytest.param(
            "[SSL: SSLV3_ALERT_CERTIFICATE_REVOKED] sslv3 alert certificate revoked",
            "https://a/v1/traces does not accept our certificate: "
            "name one that its authority signed in OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY",
            id="ours is revoked",
        ),
    ],
)
def test_a_certificate_of_ours_that_is_not_taken_is_named(said, told):
    """With the words of OpenSSL, as a real collector has it say them."""
    assert str(diagnose(OtlpSettings.from_env(otlp("https://a")), said)) == told


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param("certificate is not yet valid", " is not valid yet: set the clock of this host", id="too early"),
        pytest.param("unsuitable certificate purpose", " is not one for a server: have its", id="a client's"),
        pytest.param("unsupported certificate purpose", " is not one for a server: have its", id="a client's, to gRPC"),
        pytest.param("Missing Authority Key Identifier", ", or its authority's, is not as it must be", id="strict"),
        pytest.param("EE certificate key too weak", ", or its authority's, is not as it must be", id="weak"),
        pytest.param("unable to get local issuer certificate", " is signed by nobody we trust: name", id="unknown"),
        pytest.param("self-signed certificate", " is signed by nobody we trust: name", id="by itself"),
    ],
)
def test_a_certificate_that_fails_for_another_reason_is_not_said_to_be_signed_by_nobody(said, told):
    """Its authority is named already, and naming another would help nobody."""
    settings = OtlpSettings.from_env(otlp("https://a"))
    found = str(diagnose(settings, f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {said} (_ssl.c:1006)"))

    assert found.startswith(f"the certificate of https://a/v1/traces{told}")


def test_tls_to_a_socket_file_is_switched_off_by_the_variable_for_it():
    """It has no http:// that could be written."""
    settings = OtlpSettings.from_env(otlp("unix:///c.sock", "grpc"))
    said = "UNAVAILABLE: last error: UNKNOWN: unix:/c.sock: Tls handshake failed: WRONG_VERSION_NUMBER"

    assert str(diagnose(settings, said)) == (
        "unix:///c.sock speaks no TLS: set OTEL_EXPORTER_OTLP_INSECURE=true, which an address without http:// needs"
    )


def test_a_grpc_server_that_hangs_up_over_tls_is_not_said_to_speak_it():
    """As one in Python or C++ that wants a certificate; https:// is in the endpoint already."""
    said = "UNAVAILABLE: failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"
    plain, secure = (
        str(diagnose(OtlpSettings.from_env(otlp(f"{way}://a:1", "grpc")), said)) for way in ("http", "https")
    )

    assert plain == "a:1 hangs up: if it speaks TLS, write https:// in OTEL_EXPORTER_OTLP_ENDPOINT"
    assert secure == (
        "a:1 hangs up, as one does that does not accept our certificate: "
        "name one that its authority signed in OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY, "
        "or write http:// in OTEL_EXPORTER_OTLP_ENDPOINT if it speaks no TLS"
    )


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_who_wants_our_certificate_is_told_whatever_the_network_says(protocol, certificates, tmp_path):
    """A request of some length is often cut off before the reason can be read."""
    tls = {"cert_file": certificates.server, "key_file": certificates.server_key}
    with servers.collector(tmp_path, {**tls, "client_ca_file": certificates.authority}) as collector:
        where = collector.grpc if protocol == "grpc" else collector.http
        settings = OtlpSettings.from_env(otlp(where, protocol, CERTIFICATE=certificates.authority))
        told = set()
        for _ in range(8):
            transport = connect(settings)
            told.add(diagnose(settings, transport.send(bytes(200_000), 5).message))
            transport.close()

    assert [one for one in told if "not accept our certificate" not in one.what or "_CLIENT_KEY" not in one.cure] == []


@pytest.mark.parametrize(
    ("protocol", "trusted"),
    [("http/protobuf", {"REQUESTS_CA_BUNDLE": "authority"}), ("grpc", {"OTEL_EXPORTER_OTLP_CERTIFICATE": "server"})],
)
def test_whom_the_request_trusts_is_no_problem(protocol, trusted, secured, certificates, monkeypatch):
    """Requests knows more authorities than Python's ssl, and gRPC takes the server's own certificate for one."""
    for name, file in trusted.items():
        monkeypatch.setenv(name, getattr(certificates, file))
    where = secured.grpc if protocol == "grpc" else secured.http
    env = {**otlp(where, protocol), **{name: os.environ[name] for name in trusted}}

    found = endpoint.check(env)
    assert problems(found) == []
    assert found[-1].verdict == FINE


def test_another_way_of_speaking_is_tried(secured, certificates):
    """Both the protocol and TLS are wrong, and the same address answers otherwise."""
    (found,) = problems(endpoint.check(otlp(plain(secured.grpc), CERTIFICATE=certificates.authority)))

    assert found.cure == (
        "set OTEL_EXPORTER_OTLP_PROTOCOL=grpc and write https:// in OTEL_EXPORTER_OTLP_ENDPOINT: that gets an answer"
    )


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_token_that_was_meant_for_tls_is_never_sent_without(scheme):
    """Whoever asked for TLS is told of a plain way in; it is found without the headers."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.headers["authorization"])
            self.send_error(401)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            env = otlp(f"{scheme}://127.0.0.1:{server.server_port}", HEADERS=f"{TOKEN}t0ken")
            (found,) = [one for one in problems(endpoint.check(env)) if one.area == endpoint.AREA]
        finally:
            server.shutdown()
            thread.join()

    assert seen == ([None] if scheme == "https" else ["Bearer t0ken"])
    assert ("write http:// in" in found.cure) is (scheme == "https")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        pytest.param({"HTTP_PROXY": "http://user:secret@proxy:8"}, ["go through the proxy proxy:8"], id="a proxy"),
        pytest.param({"all_proxy": "http://proxy:8"}, ["go through the proxy http://proxy:8"], id="for all"),
        pytest.param({"HTTP_PROXY": "http://proxy:8", "NO_PROXY": "127.0.0.1"}, [], id="not for this host"),
        pytest.param({"HTTPS_PROXY": "http://proxy:8"}, [], id="of another scheme"),
    ],
)
def test_a_proxy_is_told_by_the_environment_that_is_examined(env, told, monkeypatch):
    """And not by that of the doctor's own process."""
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    settings = OtlpSettings.from_env(otlp("http://127.0.0.1:1"))
    found = [finding.what for finding in endpoint._proxy(settings, env)]

    assert found == [f"requests to http://127.0.0.1:1/v1/traces {what}" for what in told]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        pytest.param({"http_proxy": "http://proxy:8"}, ["go through the proxy http://proxy:8"], id="a proxy"),
        pytest.param({"grpc_proxy": "http://a:1", "https_proxy": "b:2"}, ["go through the proxy http://a:1"], id="two"),
        pytest.param({"http_proxy": "http://proxy:8", "NO_PROXY": "127.0.0.1"}, ["go through the proxy http://proxy:8"],
                     id="capitals are not read"),
        pytest.param({"http_proxy": "http://proxy:8", "no_proxy": "127.0.0.1"}, [], id="not for this host"),
        pytest.param({"HTTP_PROXY": "http://proxy:8", "all_proxy": "http://proxy:8"}, [], id="of requests"),
    ],
)  # fmt: skip
def test_a_proxy_of_grpc_is_told_by_the_variables_that_it_reads(env, told):
    """In small letters, and with plain HTTP and TLS alike."""
    settings = OtlpSettings.from_env(otlp("http://127.0.0.1:1", "grpc"))
    found = [(finding.what, finding.cure) for finding in endpoint._proxy(settings, env)]

    assert found == [
        (f"requests to 127.0.0.1:1 {what}", "name its host in no_proxy if they should not") for what in told
    ]


@pytest.mark.parametrize(
    ("protocol", "variable", "where", "cure"),
    [
        ("http/protobuf", "http_proxy", "http://192.0.2.1:4318/v1/traces", "correct HTTP_PROXY, HTTPS_PROXY or ALL"),
        ("grpc", "grpc_proxy", "192.0.2.1:4318", "correct grpc_proxy, https_proxy or http_proxy"),
    ],
)
@pytest.mark.parametrize("proxy", ["http://127.0.0.1", "http://no-such-host.invalid"])
def test_a_proxy_that_is_not_there_is_not_taken_for_the_collector(protocol, variable, where, cure, proxy, monkeypatch):
    """Where the proxy refuses a connection, or its name is not known, the collector may be up."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    env = {variable: f"{proxy}:{servers.free_port()}", **otlp("http://192.0.2.1:4318", protocol)}
    monkeypatch.setenv(variable, env[variable])
    (found,) = problems(endpoint.check(env))

    assert found.what == f"{where} is not reached through the proxy that the environment names"
    assert found.cure.startswith(cure)


@pytest.mark.parametrize("length", [20, 107])
def test_a_socket_file_that_is_not_there_is_a_collector_that_is_not(length):
    """As a port at which nobody listens; also of the longest path, which gRPC names twice before it says so."""
    where = f"unix://{'/no'.ljust(length - 10, '-')}/otlp.sock"
    (found,) = problems(endpoint.check(otlp(where, "grpc", INSECURE="true")))

    assert found.what == f"nothing listens at {where}"


# -- the end of a run ----------------------------------------------------------------------------


def trained(folder: Path, env: dict[str, str]) -> tuple[str, int]:
    """Train under *env*; return the last line, which the drain's end is waited for, and how many spans are here."""
    with a_place(folder) as place:
        program = str(place.write(STEPS))
        done = place.command("run", "--no-report", "--", sys.executable, program, **env)
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
        (line,) = done.stderr.splitlines()
        return line, sum(map(len, place.spans()))


IN_RUNS = ("absent", "HTTP to the gRPC port", "gRPC to the HTTP port", "self-signed", "wrong token")


@pytest.mark.parametrize(("env", "what", "cure"), [case for case in REAL if case.id in IN_RUNS])
def test_the_last_line_of_a_run_says_it_too(env, what, cure, at, tmp_path):
    """The training is untouched, its spans are in the run directory, and the line says what keeps them here."""
    line, spans = trained(tmp_path, env(at))

    assert (what in line, cure in line, "none lost" in line) == (True, True, True), line
    assert spans == 3


def test_the_last_line_doubts_a_server_that_says_yes_to_all(tmp_path):
    """Spans may have vanished there: who reads that they were sent reads that, too."""
    with answering(http_server, (200, {"content-type": "text/html"}, b"<html>")) as env:
        line, _ = trained(tmp_path, env)

    assert re.search(r" sent \(\S+ says yes in text/html, which is not an answer of OTLP", line), line


@pytest.mark.parametrize(("serve", "answer", "what", "cure"), TOLD[:4])
def test_the_last_line_of_a_run_says_what_the_collector_answered(serve, answer, what, cure, tmp_path):
    """As above; of what the collector rejects, how much."""
    with answering(serve, answer) as env:
        line, spans = trained(tmp_path, env)

    assert (what in line, cure in line, "none lost" in line) == (True, True, True), line
    assert spans == 3


def test_the_command_of_the_last_line_can_be_pasted(tmp_path):
    """Also where the run directory has a space in its name."""
    with a_place(tmp_path) as place:
        done = place.run(waiting(f"import otel_dltrace; otel_dltrace.start()\n{STEPS}"), OTEL_DLTRACE_DIR="my runs")
        *_, command = done.stderr.rstrip().partition("read them with: ")
        (run,) = tmp_path.glob("my runs/*")

        assert shlex.split(command) == ["otel-dltrace", "report", str(run.relative_to(tmp_path))], done.stderr
        assert place.command(*shlex.split(command)[1:]).returncode == 0


# -- the rest ------------------------------------------------------------------------------------


def doctor(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the command under *env* alone."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "BYTEPS_", "PYTHONPATH"))}
    command = [sys.executable, "-m", "otel_dltrace", "doctor", *args]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=240, check=False)


def test_the_command_says_all_of_it_and_its_code_tells(tmp_path, monkeypatch):
    """0 where nothing is wrong, with every area in the table; 1 and the same in JSON where something is."""
    monkeypatch.chdir(tmp_path)
    well = doctor("--quick")
    ill = doctor("--quick", "--json", OTEL_DLTRACE="1", OTEL_DLTRACE_LVL="step")
    areas = ("environment", "versions", "entry points", ".pth", "others", "frameworks", "endpoint", "clock")
    told = json.loads(ill.stdout)

    assert well.returncode == 0, well.stdout
    assert [area for area in (*areas, "rings", "run directory", "fork", "last run") if area not in well.stdout] == []
    assert (ill.returncode, told["verdict"]) == (1, "problem")
    assert [finding for finding in told["findings"] if finding["verdict"] == "problem"] == [
        {
            "area": "environment",
            "verdict": "problem",
            "what": "OTEL_DLTRACE_LVL=step is not a variable we know, and has no effect",
            "cure": "did you mean OTEL_DLTRACE_LEVEL?",
        }
    ]


def test_a_check_that_cannot_be_made_is_a_finding(monkeypatch):
    """The doctor is asked where things are broken; the others are made."""

    def broken() -> list[Finding]:
        raise ModuleNotFoundError("No module named 'numpy'")

    monkeypatch.setattr(installation, "entry_points", broken)
    found = examine({}, import_frameworks=False)

    assert [(one.area, one.what) for one in problems(found)] == [
        ("entry points", "this could not be checked: ModuleNotFoundError: No module named 'numpy'")
    ]
    assert {"environment", "clock", "fork"} < {one.area for one in found}


def test_a_wrong_option_is_no_finding():
    """Exit code 2, as of every command."""
    assert doctor("--slow").returncode == 2


def test_torch_is_found_and_would_be_traced():
    """It is imported in a process of its own, where all of our tables finds its place."""
    pytest.importorskip("torch")
    code = "from otel_dltrace.doctor.frameworks import patched\nimport sys, json\nanswer = patched(['torch'])"
    child = Child.ask(code, {"OTEL_DLTRACE": "0"})

    assert (child.answer["missing"], child.answer["absent"], child.said) == ([], [], "")
    assert "torch.distributed.distributed_c10d.all_reduce" in child.answer["placed"]


def test_a_framework_of_which_nothing_can_be_imported_is_told(tmp_path, monkeypatch):
    """As an mpi4py whose MPI is not there, or a Horovod without torch, which may be nobody's trouble."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: initialize = True\n")
    (package / "MPI.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (found,) = frameworks._frameworks(["mpi4py"], import_them=True)

    assert found.verdict == NOTE
    assert "is not traced, since nothing that we trace in it can be imported: libmpi.so.40: cannot" in found.what
    assert found.cure == f"to have it traced, fix it first: {sys.executable} -c 'import mpi4py.MPI'"


def test_a_framework_that_ends_its_process_is_a_finding():
    """What a child does at its import is no harm to the doctor."""
    child = Child.ask("import os; os.abort()", {})

    assert (child.answer, child.trouble) == (None, "exit code -6")


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        pytest.param({"OTEL_DLTRACE_LEVL": "x"}, ["OTEL_DLTRACE_LEVL=x is not a variable"], id="misspelt"),
        pytest.param({"DLTRACE_LEVEL": "x"}, ["DLTRACE_LEVEL=x is not a variable"], id="without OTEL"),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPONT": "x"}, ["OTEL_EXPORTER_OTLP_ENDPONT=x is no"], id="OTLP misspelt"),
        pytest.param(
            {"OTEL_DLTRACE_LEVEL": "x", "OTEL_DLTRACE_STEPS": "y"},
            ["OTEL_DLTRACE_LEVEL='x' is not a level", "OTEL_DLTRACE_STEPS='y'"],
            id="two bad values",
        ),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPOINT": "h"}, ["OTEL_EXPORTER_OTLP_ENDPOINT='h' is not a URL"], id="URL"),
        pytest.param(
            {"OTEL_RESOURCE_ATTRIBUTES": "run=5,team:red, ,=x"},
            [f"OTEL_RESOURCE_ATTRIBUTES: '{entry}' is not name=value" for entry in ("team:red", "=x")],
            id="no attributes",
        ),
        pytest.param({"OTEL_TRACES_EXPORTER": "nix"}, ["OTEL_TRACES_EXPORTER: no exporter"], id="exporter"),
        pytest.param({"OTEL_DLTRACE": "maybe"}, ["OTEL_DLTRACE='maybe' is neither"], id="switch"),
        pytest.param(
            {"OTEL_DLTRACE": "1", "OTEL_SDK_DISABLED": "true"}, ["OTEL_DLTRACE=1 asks for tracing"], id="both"
        ),
        pytest.param(
            {"OTEL_EXPORTER_CHROME_TRACE_MAX_BYTES": "foo", "OTEL_EXPORTER_CHROME_TRACE_MAX_FILES": "2"},
            ["OTEL_EXPORTER_CHROME_TRACE_MAX_BYTES='foo' is not a whole number"],
            id="Chrome",
        ),
        pytest.param(
            {"OTEL_TRACES_SAMPLER": "dltrace_step", "OTEL_TRACES_SAMPLER_ARG": "2"},
            ["OTEL_TRACES_SAMPLER_ARG='2' is not a share of traces from 0 to 1"],
            id="of our sampler",
        ),
        pytest.param({"OTEL_TRACES_SAMPLER": "x", "OTEL_TRACES_SAMPLER_ARG": "2"}, [], id="of another sampler"),
        pytest.param(
            {"OTEL_TRACES_SAMPLER": "DLTRACE_STEP", "OTEL_PYTHON_ID_GENERATOR": "dltrace_ids"},
            [
                "OTEL_TRACES_SAMPLER: DLTRACE_STEP is not one of our names, and the SDK uses its default sampler",
                "OTEL_PYTHON_ID_GENERATOR: dltrace_ids is not one of our names, and the SDK does not start",
            ],
            id="our plugins misspelt",
        ),
        pytest.param(
            {"OTEL_DLTRACE_JAEGER_URL": "me:secret@jaeger:1"},
            ["OTEL_DLTRACE_JAEGER_URL='jaeger:1' is not an address of jaeger: write http://HOST:PORT"],
            id="viewer",
        ),
        pytest.param({"OTEL_DLTRACE_JAEGER_URL": "http://"}, ["OTEL_DLTRACE_JAEGER_URL='http://' is"], id="no host"),
        pytest.param({"OTEL_LOGS_EXPORTER": "none", "OTEL_BSP_SCHEDULE_DELAY": "9"}, [], id="of the SDK"),
        pytest.param({"OTEL_EXPORTER_JAEGER_ENDPOINT": "h", "OTEL_DLTRACE_LEVEL": "step"}, [], id="of somebody else"),
    ],
)
def test_what_the_environment_gets_wrong_is_named(env, problem):
    """Each variable by its name, with what is wrong about it."""
    found = [finding.what for finding in problems(environment.check(env))]

    assert [what for what, said in zip(found, problem, strict=True) if not what.startswith(said)] == []


def test_what_opentelemetry_forbids_is_not_advised():
    """`OTEL_DLTRACE=1` alone would switch nothing on."""
    switch, *_ = environment.check({"OTEL_SDK_DISABLED": "true"})

    assert (switch.verdict, switch.cure) == ("fine", "unset OTEL_SDK_DISABLED, and set OTEL_DLTRACE=1")


@pytest.mark.parametrize(
    "name",
    [
        "OTEL_CONFIG_FILE",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        "OTEL_EXPORTER_PROMETHEUS_HOST",
        "OTEL_EXPORTER_PROMETHEUS_PORT",
    ],
)
def test_what_acts_on_us_by_way_of_the_sdk_is_not_said_to_do_nothing(name):
    """Each is documented to act, here or in a test: what we record, and how metrics are sent."""
    (finding,) = environment.check({name: "8080"})[1:]

    assert (finding.verdict, finding.what.partition(",")[0]) == (FINE, f"{name}=8080")


@pytest.mark.parametrize(("seconds", "verdict"), [("10", FINE), ("2.5", FINE), ("10000", NOTE)])
def test_a_timeout_that_is_meant_in_milliseconds_is_told(seconds, verdict):
    """With it a request to a collector that hangs holds up the others for hours."""
    (finding,) = environment.check({"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": seconds})[1:]

    assert finding.verdict == verdict, finding


def test_a_misspelt_name_of_what_to_leave_out_is_told():
    """It leaves nothing out; what is traced goes by these names, and others are not ours to judge."""
    name = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"

    (found,) = problems(environment.check({name: "dltrace_torch_dpp, dltrace_torch_ddp,redis"}))
    assert (found.what, found.cure) == (
        f"{name}: dltrace_torch_dpp is not one of our names, and leaves nothing out",
        "did you mean dltrace_torch_ddp?",
    )


def test_a_bad_name_hides_no_other_that_it_begins_with():
    """The switch is told as well as what is wrong beside it; of metrics, that spans go on."""
    env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_LEVEL": "x", "OTEL_METRIC_EXPORT_INTERVAL": "0", **otlp("http://h")}
    env["OTEL_BSP_SCHEDULE_DELAY"] = "never"
    found = environment.check(env)

    assert "OTEL_DLTRACE=1" in [finding.what for finding in found if finding.verdict == FINE]
    assert [(one.what.partition("=")[0], one.cure) for one in problems(found)] == [
        ("OTEL_DLTRACE_LEVEL", "with it, programs run untraced"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "with it, no metrics are sent; spans are"),
        ("OTEL_BSP_SCHEDULE_DELAY", "with it, spans wait 5 s to go out together"),
    ]


def test_a_library_that_is_missing_is_told(monkeypatch):
    """One that came with us, and that somebody has removed: without psutil no host is sampled."""
    there = installation.version

    def version(name):
        if name == "psutil":
            raise PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(installation, "version", version)
    (found,) = problems(installation.versions())

    assert (found.what, found.cure) == (
        "psutil is missing: the drain and the commands need it",
        "pip install otel-dltrace",
    )


def test_an_answer_that_cannot_be_written_is_trouble():
    """It left nothing, or half of it."""
    found = Child.ask("import sys, json; answer = [{1, 2}]", {})

    assert (found.answer, found.trouble) == (None, "TypeError: Object of type set is not JSON serializable")


def test_what_is_asked_of_a_child_needs_no_folder(monkeypatch):
    """As on the read-only root of a container."""
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    assert Child.ask("import sys, json; answer = 5", {}) == Child(5, "", "")


def test_what_lies_in_the_working_directory_is_no_module_of_a_child(tmp_path, monkeypatch):
    """Not a user's `queue.py`, nor what a stranger has put where all may write."""
    monkeypatch.chdir(tmp_path)
    for name in ("otel_dltrace", "json", "queue", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')\n")

    code = "import sys, json, queue, numpy, otel_dltrace.model\nanswer = 5"
    assert Child.ask(code, {}) == Child(5, "", "")


def test_python_itself_is_no_framework():
    """We follow its garbage collector, and import nothing for that."""
    assert "gc " not in "".join(finding.what for finding in frameworks.check(import_them=False))


def test_secrets_are_not_printed():
    """Neither a token nor a password."""
    env = otlp("http://user:secret@127.0.0.1:1", HEADERS=f"{TOKEN}secret,b=secret")
    others = [
        otlp("user:secret@127.0.0.1:1"),
        otlp("user:secret@127.0.0.1:1", "grpc"),
        otlp("http://user:a@secret@127.0.0.1:1/v1?token=secret"),
        {"OTEL_DLTRACE_JAEGER_URL": "user:secret@jaeger:16686", "OTEL_RESOURCE_ATTRIBUTES": "owner=a@b"},
        {"OTEL_EXPORTER_OTLP_HEADER": "a=secret", "OTEL_EXPORTER_OTLP_ENDPOINTS": "http://h:1/?token=secret"},
        {"OTEL_EXPORTER_OTLP_TOKEN": "secret", "OTEL_EXPORTER_JAEGER_PASSWORD": "secret"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "Bearer secret", "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "a=b,secret"},
        {"OTEL_EXPORTER_OTLP_CLIENT_KEY": "-----BEGIN PRIVATE KEY-----\nsecret"},
    ]
    found = [finding for one in (env, *others) for finding in (*environment.check(one), *endpoint.check(one))]
    told = [finding.what for finding in found]

    assert {"OTEL_EXPORTER_OTLP_HEADERS=authorization=...,b=...", "OTEL_RESOURCE_ATTRIBUTES=owner=a@b"} <= {*told}
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("folders", "env", "verdict", "says"),
    [
        pytest.param([], {}, FINE, "nothing else", id="nobody"),
        pytest.param(
            ["opentelemetry/instrumentation/auto_instrumentation"], {"OTEL_DLTRACE": "1"}, NOTE, "done once",
            id="opentelemetry-instrument and our switch",
        ),
        pytest.param(
            ["opentelemetry/instrumentation/auto_instrumentation"], {}, FINE, "switches tracing on",
            id="opentelemetry-instrument alone",
        ),
        *(
            pytest.param(
                ["opentelemetry/instrumentation/auto_instrumentation"], env, FINE, "leaves tracing off",
                id=f"opentelemetry-instrument, {'='.join(*env.items())}",
            )
            for env in (
                {"OTEL_DLTRACE": "0"}, {"OTEL_DLTRACE": "off"}, {"OTEL_DLTRACE": "?"}, {"OTEL_SDK_DISABLED": "true"},
            )
        ),
        pytest.param(["ddtrace/bootstrap"], {"OTEL_DLTRACE": "1"}, NOTE, "except for torch", id="ddtrace-run"),
        pytest.param(
            ["ddtrace/bootstrap"], {"OTEL_DLTRACE": "1", "DD_TRACE_PYTORCH_ENABLED": "true"}, PROBLEM, "both wrap",
            id="ddtrace's torch",
        ),
    ],
)  # fmt: skip
def test_two_instrumentations_at_once_are_told(folders, env, verdict, says):
    """By what they put on PYTHONPATH."""
    (found,) = installation.others({**env, "PYTHONPATH": os.pathsep.join(f"/lib/{folder}" for folder in folders)})

    assert (found.verdict, says in found.what) == (verdict, True)


def test_a_sitecustomize_that_hides_another_is_told(tmp_path):
    """Python runs one of them."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "sitecustomize.py").touch()
    (found,) = installation.others({"PYTHONPATH": os.pathsep.join(map(str, folders))})

    assert (found.verdict, f"{tmp_path}/a/sitecustomize.py may hide {tmp_path}/b" in found.what) == (NOTE, True)


def test_a_folder_that_python_passes_over_is_passed_over(monkeypatch):
    """Another user's home, as of `sudo -E`, or a name that cannot be: Python does not mind either."""
    monkeypatch.setattr(installation.site, "getusersitepackages", lambda: "/" + "x" * 300)
    monkeypatch.setattr(installation.site, "ENABLE_USER_SITE", True)
    found = [*installation.pth(), *installation.others({"PYTHONPATH": "/" + "x" * 300})]

    assert [(one.area, one.verdict) for one in found] == [(".pth", FINE), ("others", FINE)]


def test_rings_belong_on_a_tmpfs(tmp_path):
    """A disk is slow, and may be remote."""
    on_disk = host._file_system(tmp_path) not in ("tmpfs", "ramfs")
    found = host.shared_memory(Config(ring_directory=str(tmp_path / "rings")))

    assert (PROBLEM in {finding.verdict for finding in found}) is on_disk
    assert worst(host.shared_memory(Config())) == FINE


@pytest.mark.parametrize("below", ["", "rings"])
def test_a_link_to_nothing_is_no_place_for_rings(tmp_path, below):
    """Nothing can be made where it is, and no process would be traced."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    (found,) = host.shared_memory(Config(ring_directory=str(link / below)))

    assert (found.verdict, str(link) in found.what, "OTEL_DLTRACE_RING_DIR" in found.what + found.cure) == (
        PROBLEM,
        True,
        True,
    )


@pytest.mark.parametrize(("asked", "verdict"), [(4 << 20, FINE), (1 << 60, NOTE)], ids=["usual", "absurd"])
def test_a_ring_is_no_larger_than_its_share_of_the_memory_where_there_is_no_limit(monkeypatch, asked, verdict):
    """As the recorder makes it."""
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: unlimited)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 15, "SC_PAGE_SIZE": 1 << 12}.__getitem__)
    found = host.shared_memory(Config(ring_directory="/dev/shm/rings", ring_size=asked))[0]

    size = "4.0" if verdict == FINE else "6.4"
    said = f"/dev/shm/rings (no limit but the memory's 128 MiB) gives each process a ring of {size} MiB"
    assert (found.verdict, found.what) == (verdict, said)


def test_a_folder_that_cannot_be_written_is_told(monkeypatch):
    """By its variable, or because it is where we are; the doctor goes on."""
    envs = ({"OTEL_DLTRACE_DIR": folder} for folder in ("/proc/runs", "~no-such-user/runs"))
    said = [finding.what for env in envs for finding in problems(host.run_directory(env, Config()))]
    monkeypatch.chdir("/proc/self")

    assert said == [
        "OTEL_DLTRACE_DIR='/proc/runs' cannot be written: No such file or directory",
        "OTEL_DLTRACE_DIR='~no-such-user/runs' names a user who has no home directory",
    ]
    assert [finding.area for finding in problems(examine({}, import_frameworks=False))] == ["run directory"]


def test_a_bad_variable_leaves_the_others_as_they_are(tmp_path):
    """What is said of rings and runs is of those that programs will have."""
    env = {"OTEL_DLTRACE_LEVEL": "x", "OTEL_DLTRACE_QUOTA": "y", "OTEL_DLTRACE_RING_SIZE": "1M"}
    config = environment.config_of({**env, "OTEL_DLTRACE_DIR": str(tmp_path)})

    assert config == Config(ring_size=1 << 20, directory=str(tmp_path))


@pytest.mark.parametrize(
    ("env", "kept"),
    [
        pytest.param({"OTEL_DLTRACE_COMM_DIR": "/proc/nope"}, {}, id="a folder that cannot be written"),
        pytest.param({"OTEL_DLTRACE_DIR": "/proc/a", "OTEL_DLTRACE_RING_DIR": "/proc/b"}, {}, id="two of them"),
        pytest.param(
            {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": "/proc/x"},
            {"level": "partition", "steps": "9-19", "comm_steps": "10-20", "comm_directory": "trace"},
            id="one of BytePS's",
        ),
        pytest.param({"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "50"}, {}, id="a default of BytePS's"),
        pytest.param(
            {"BYTEPS_SERVER_ENABLE_PROFILE": "1", "BYTEPS_SERVER_PROFILE_OUTPUT_PATH": "/proc/x"},
            {"server_spans": "on", "server_profile": "server_profile.json"},
            id="a server's profile",
        ),
    ],
)
def test_the_doctor_looks_on_without_what_cannot_be_used(env, kept, tmp_path, monkeypatch):
    """It is told by its variable, and no reason to end."""
    monkeypatch.chdir(tmp_path)

    assert environment.config_of({**env, "OTEL_DLTRACE_QUOTA": "7"}) == Config(quota=7, **kept)
    assert worst([*environment.check(env), *host.run_directory(env, Config())]) == PROBLEM


def test_folders_that_cannot_be_written_are_those_that_are_looked_at(tmp_path):
    """Others that would do are none that a program will have: what lies there is not its last run."""
    file = tmp_path / "file"
    file.touch()
    env = {"OTEL_DLTRACE_DIR": f"{file}/runs", "OTEL_DLTRACE_RING_DIR": f"{file}/rings"}

    found = examine(env, import_frameworks=False)

    assert [(one.verdict, one.what) for one in found if one.area in ("rings", "last run")] == [
        (PROBLEM, f"{file}/rings cannot be made: {file} cannot be written"),
        (FINE, f"there is no run in {file}/runs yet"),
    ]


def test_without_any_folder_the_doctor_says_so(monkeypatch):
    """It has nowhere to look then."""
    monkeypatch.chdir("/proc/self")
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    with pytest.raises(ConfigError, match="not even /proc can be written: set TMPDIR"):
        environment.config_of({"OTEL_DLTRACE_DIR": "/proc/x", "OTEL_DLTRACE_QUOTA": "7"})


def test_the_folder_for_runs_is_not_blamed_for_that_of_rings(tmp_path, monkeypatch):
    """That of rings has a variable of its own, here with a folder that can be."""
    monkeypatch.setattr("otel_dltrace.settings.config.private_folder", lambda: "/proc/rings")
    rings = tmp_path / "rings"

    assert problems(host.run_directory({"OTEL_DLTRACE_DIR": str(tmp_path)}, Config(ring_directory=str(rings)))) == []


def test_a_fork_that_would_hang_is_told():
    """Where the drain is a thread of the program, gRPC is in it."""
    env = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "GRPC_ENABLE_FORK_SUPPORT": "0"}

    assert [one.verdict for one in host.forks(env, Config(drain="thread"))] == [NOTE, PROBLEM]
    assert [one.verdict for one in host.forks(env, Config())] == [NOTE]
    assert worst(host.forks({}, Config())) == FINE


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        pytest.param({"spans": 5}, FINE, id="all well"),
        pytest.param({"spans": 5, "lapped_phase": 2}, PROBLEM, id="lost"),
        pytest.param({"spans": 5, "otlp": {"accepted": 1, "rejected": 4, "rejection": "old"}}, PROBLEM, id="rejected"),
        pytest.param({"spans": 5, "otlp": {"accepted": 1, "spilled": 4, "trouble": "away"}}, NOTE, id="waiting"),
    ],
)
def test_the_last_run_is_looked_at(figures, verdict, tmp_path):
    """What was lost or rejected is a problem, what waits is worth a note."""
    folder = tmp_path / "dltrace-job-00000000" / "hosts" / "node"
    folder.mkdir(parents=True)
    (folder / "drain.json").write_text(json.dumps({"summary": figures, "processes": [], "ended": True}))
    (found,) = runs.check(Config(directory=str(tmp_path), ring_directory=str(tmp_path / "rings")))

    assert found.verdict == verdict
    assert found.what.startswith("dltrace-job-00000000, ")
    assert " ago: 5 spans recorded" in found.what


def test_of_a_run_under_way_what_is_read_so_far_is_told(tmp_path):
    """Nobody knows yet that none is lost."""
    folder = tmp_path / "dltrace-job-00000000" / "hosts" / "node"
    folder.mkdir(parents=True)
    told = {"summary": {}, "processes": [], "ended": False, "so_far": 7}
    (folder / "drain.json").write_text(json.dumps(told))
    (found,) = runs.check(Config(directory=str(tmp_path), ring_directory=str(tmp_path / "rings")))

    assert found.what.endswith(": 7 spans recorded; the drain is at work, or was killed")


def test_the_last_run_is_the_one_that_began_last(tmp_path):
    """The figures of an earlier run are written anew when its drain has lingered, or by `recover`."""
    for number, name in enumerate(["dltrace-later-00000000", "dltrace-earlier-00000000"]):
        folder = tmp_path / name / "hosts" / "node"
        folder.mkdir(parents=True)
        (folder / "drain.json").write_text(json.dumps({"summary": {"spans": 5}, "processes": []}))
        (folder.parents[1] / "run.json").write_text("{}")
        os.utime(folder.parents[1] / "run.json", (1000 - number, 1000 - number))
        os.utime(folder / "drain.json", (2000 + number, 2000 + number))
    (found,) = runs.check(Config(directory=str(tmp_path), ring_directory=str(tmp_path / "rings")))

    assert found.what.startswith("dltrace-later-00000000, ")
