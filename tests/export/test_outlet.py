"""The drain's side of OTLP: what is encoded together, what is still unsettled, and the cursor beside a ring."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.outgoing import outlet as outlet_module
from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.outgoing.outlet import BROKEN, Outlet
from otel_dltrace.export.rings.cursor import Cursor, Place
from otel_dltrace.export.rings.reader import TAKEN
from otel_dltrace.model.identity import rank_step_id, root_id
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.spans import SpanBatch, empty_rows
from tests.support.runs import Rank


class Collector:
    """A transport that accepts requests once it is told to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.is_there = threading.Event()

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Keep *body*."""
        self.is_there.wait(deadline_s)
        self.bodies.append(body)
        return Outcome(Verdict.ACCEPTED)

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def collector(monkeypatch) -> Collector:
    """Give what every outlet of the test sends to."""
    it = Collector()
    monkeypatch.setattr(outlet_module, "connect", lambda _: it)
    return it


def a_step(rank: int, step: int) -> tuple[SpanBatch, Outgoing]:
    """Return one decided step of one rank."""
    batch = Rank(rank, 2).step(step, 0.0, 10.0, seq=1).stage(step, "forward", 0.0, 4.0).batch()
    return batch, Outgoing(step, batch.rows, left_out=rank)


def test_a_process_that_cannot_be_encoded_takes_no_other_along(collector, capsys):
    """What is lost of it is counted, and one sentence says why; the run directory has it."""
    outlet = Outlet(OtlpSettings("http://localhost:4318/v1/traces"))
    (bad, its_step), (good, step) = a_step(0, 7), a_step(1, 7)
    outlet.send(replace(bad, process=replace(bad.process, bind=None)), [its_step])
    outlet.send(good, [step])
    outlet.flush()
    collector.is_there.set()
    outlet.close(5.0)

    told = outlet.figures()
    assert (told["sent"], told["accepted"], told["dropped"]) == (2, 2, {BROKEN: 2})
    assert outlet.unsettled() == set()
    assert "AssertionError" in capsys.readouterr().err


def test_what_was_taken_since_the_last_flush_is_one_request(collector):
    """Each process under its own resource; until the collector has it, each process's first step is unsettled."""
    outlet = Outlet(OtlpSettings("http://localhost:4318/v1/traces"))
    steps = [a_step(rank, 7 + rank) for rank in range(2)]
    for batch, outgoing in steps:
        outlet.send(batch, [outgoing])
    tags = {(batch.process.nonce, outgoing.step) for batch, outgoing in steps}

    assert (outlet.unsettled(), outlet.sent) == (tags, 0)
    outlet.flush()
    assert (outlet.unsettled(), outlet.sent) == (tags, 4)
    collector.is_there.set()
    outlet.close(5.0)
    assert outlet.figures()["accepted"] == 4
    assert outlet.unsettled() == set()

    (body,) = collector.bodies
    resource_spans = ExportTraceServiceRequest.FromString(body).resource_spans
    spans = [list(part.scope_spans[0].spans) for part in resource_spans]
    assert [sorted(span.name for span in part) for part in spans] == [["forward", "rank.step"]] * 2
    for (batch, outgoing), part in zip(steps, spans, strict=True):
        bind = batch.process.bind
        parents = {span.name: int.from_bytes(span.parent_span_id, "big") for span in part}
        step = outgoing.step
        assert parents == {"rank.step": root_id(bind, step), "forward": rank_step_id(bind, step)}
        left_out = {a.key: a.value.int_value for span in part for a in span.attributes}.get("dl.spans.left_out", 0)
        assert left_out == outgoing.left_out


# -- the cursor ----------------------------------------------------------------------------------


def a_cursor() -> Cursor:
    """Return a cursor with something in every field."""
    taken = np.zeros(16, TAKEN)
    taken["slots"], taken["lease"], taken["levels"][:, 2] = 0xFFFF_FFFF_FFFF_FFFE, np.arange(16), 63
    unfinished = empty_rows(2)
    unfinished["span_no"], unfinished["level"] = [5, 6], Level.STEP
    places = {"first/hosts/a": Place(3, 120, 99, 17, loose=False), "second/hosts/a": Place(1, 7, 5, 17)}
    return Cursor(taken, unfinished, places, [0, 1, 2, 3, 4])


def test_a_cursor_is_read_as_it_was_written(tmp_path):
    """Whole, or not at all."""
    a_cursor().write(tmp_path / "a.cursor")

    read = Cursor.read(tmp_path / "a.cursor")

    assert read.taken.tobytes() == a_cursor().taken.tobytes()
    assert read.unfinished.tobytes() == a_cursor().unfinished.tobytes()
    assert (read.places, read.lapped) == (a_cursor().places, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("loose", [(False, False), (True, False), (False, True)])
def test_a_place_in_a_run_that_a_process_was_of_twice_owes_what_either_does(loose):
    """Where it reads on is that of the later one; what is in the folder is that of both."""
    earlier = Place(1, 10, 5, 7, loose[0], 1)
    assert Place(2, 20, 6, 9, loose[1], 2).behind(earlier) == Place(2, 20, 11, 7, any(loose), 3)
    assert Place(2, 20, 6, 4, loose[1], 2).behind(earlier).undelivered == 4
    assert earlier.behind(None) == earlier


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda data: data[:-1], id="cut"),
        pytest.param(lambda data: data + b"x", id="longer"),
        pytest.param(lambda data: b"{" + data[1:], id="another format"),
        pytest.param(lambda data: data[:30] + b"\xff" * 20 + data[50:], id="garbage within"),
        pytest.param(lambda data: data.replace(b"second/hosts/a", b"second_hosts_a"), id="a place in no run"),
        pytest.param(lambda data: data.replace(b"second/hosts/a", b"/econd_hosts_a"), id="one below the root"),
    ],
)
def test_a_damaged_cursor_is_a_fresh_one(tmp_path, damage):
    """The ring is then read from its beginning, and what the run directory has of it is not written again."""
    path = tmp_path / "a.cursor"
    a_cursor().write(path)
    path.write_bytes(damage(path.read_bytes()))

    read = Cursor.read(path)

    assert (read.taken, len(read.unfinished), read.places) == (None, 0, {})
