"""What a server answers to one request, or does instead, means what the protocol says, and no secret is told."""

import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress
from email.utils import formatdate

import grpc
import pytest
from google.rpc.status_pb2 import Status

from otel_dltrace.export.otlp.diagnosis import diagnose
from otel_dltrace.export.otlp.grpc_transport import _Addresses
from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.settings import OtlpSettings
from tests.support.otlp_ways import ACCEPTED, PROTOCOLS, body_of, connected, settings_for
from tests.support.told import Told, grpc_server, http_server, response

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
