"""The sender: what goes wrong on the way is waited out, bounded, kept on disk and made good."""

import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.pause import pause_s
from otel_dltrace.export.otlp.resend import resend
from otel_dltrace.export.otlp.sender import Sender
from otel_dltrace.export.otlp.spill import Spill
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.export.otlp.waiting import NO_ROOM, SPILL_FULL
from otel_dltrace.model.summary import REFUSED
from otel_dltrace.record import guard
from tests.support import servers
from tests.support.otlp_ways import PROTOCOLS, body_of, endpoint_of, ids, request_of, settings_for
from tests.support.paths import ROOT
from tests.support.processes import room_for
from tests.support.told import Told, grpc_server, http_server, response


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
