"""`otel-dltrace doctor`, and the last line of a run, name what is wrong with a collector; the training goes on."""

import errno
import os
import re
import shlex
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from otel_dltrace.doctor import endpoint, frameworks
from otel_dltrace.doctor.child import Child
from otel_dltrace.export.otlp.diagnosis import diagnose
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding
from tests.support import servers
from tests.support.findings import TOKEN, otlp, problems
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
