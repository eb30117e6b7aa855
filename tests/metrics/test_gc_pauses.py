"""Garbage collections as spans and as metrics, the peak of memory: what only the process itself knows."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_dltrace.instrument import process
from otel_dltrace.instrument._sites import Attachment
from otel_dltrace.model.attributes import number_columns
from otel_dltrace.model.metrics import DL_GC_PAUSE, DL_PROCESS_MEMORY_PEAK, GC_GENERATION
from otel_dltrace.model.semconv import CPYTHON_GC_GENERATION, GC
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring_file import COUNTER
from otel_dltrace.record.tracer import Tracer, live
from tests.support.processes import Place
from tests.support.torch_harness import Recorded, read_ring

(ROW,) = process.ROWS
assert isinstance(ROW, Attachment)


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[Tracer]:
    """A live tracer whose metrics are on."""
    live.tracer = tracer = Tracer(Recorder(tmp_path, 1 << 20))
    tracer.metrics = True
    yield tracer
    live.tracer = None
    tracer.recorder.close()


def recorded(tracer: Tracer) -> Recorded:
    """Return what *tracer* has recorded, which it does no more."""
    assert tracer.recorder.ring is not None
    path = tracer.recorder.ring.path
    tracer.recorder.close()
    return read_ring(path)


def collected(tracer: Tracer) -> None:
    """Collect in each generation, and only then: in step 0."""
    gc.disable()
    undo = ROW.attach(gc)
    try:
        tracer.steps.begin()
        for generation in (0, 2, 1):
            gc.collect(generation)
        tracer.steps.end()
    finally:
        undo()
        gc.enable()


def test_a_collection_is_a_span_and_an_observation(tracer: Tracer) -> None:
    """One each, of the same length, in the step and with the generation."""
    collected(tracer)
    found = recorded(tracer)
    spans = found.spans("phase", GC)
    values = [record for record in found.records if record.kind == COUNTER]
    (step,) = found.spans("step")

    assert [(s.step, s.b, s.parent, s.level) for s in spans] == [(0, 0, 0, 3), (0, 2, 0, 3), (0, 1, 0, 3)]
    assert all(step.start <= s.start < s.end for s in spans)
    assert [(v.name, json.loads(v.descriptor.activity)) for v in values] == [
        (DL_GC_PAUSE, {GC_GENERATION: generation}) for generation in (0, 2, 1)
    ]
    assert [v.size for v in values] == [s.end - s.start for s in spans]


def test_without_metrics_nothing_is_recorded(tracer: Tracer) -> None:
    """They are asked for by their own variable."""
    tracer.metrics = False
    collected(tracer)

    assert [record.name for record in recorded(tracer).records] == ["rank.step", "rank.step"]


def test_at_level_step_there_is_the_metric_alone(tracer: Tracer) -> None:
    """A pause is no stage, and its sum is what a month-long run wants."""
    tracer.recorder.level = 1
    collected(tracer)
    found = recorded(tracer)

    assert found.spans("phase") == []
    assert [record.name for record in found.records if record.kind == COUNTER] == [DL_GC_PAUSE] * 3


def test_a_process_that_only_collects_has_no_ring(tracer: Tracer, tmp_path: Path) -> None:
    """Launchers and compile workers record nothing, and so get no ring and no drain."""
    undo = ROW.attach(gc)
    gc.collect()
    undo()

    assert list(tmp_path.iterdir()) == []


def test_the_interpreter_s_list_is_left_as_it_was() -> None:
    """Also where the program has cleared it."""
    before = list(gc.callbacks)
    undo = ROW.attach(gc)
    more = len(gc.callbacks) - len(before)
    undo()
    again = ROW.attach(gc)
    gc.callbacks.pop()
    again()

    assert (more, gc.callbacks) == (1, before)


def test_an_error_in_a_pause_stays_ours(tracer: Tracer, capfd: pytest.CaptureFixture[str]) -> None:
    """The interpreter would print it; it is told once."""
    tracer.steps.begin()
    pauses = process.Pauses()
    pauses("start", {})
    pauses("stop", {"nothing": 0})
    pauses("stop", {})

    assert capfd.readouterr().err.count("gc failed and is not traced (KeyError") == 1


def test_the_peak_of_memory_is_recorded_where_it_rises(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a step, at most twice a second; what the drain can read of us it reads itself."""
    now = 10**12
    monkeypatch.setattr(process, "monotonic_ns", lambda: now)
    process.follow_memory(tracer)
    held = []
    for step in range(5):
        tracer.steps.begin()
        now += process.EVERY_NS // 2
        if step == 2:
            held.append(os.urandom(64 << 20))
    tracer.steps.end()
    peaks = [record.size for record in recorded(tracer).records if record.name == DL_PROCESS_MEMORY_PEAK]

    assert 1 <= len(peaks) <= 3
    assert peaks == sorted(set(peaks))
    assert peaks[0] > 1 << 20


PROGRAM = """
    import gc
    import otel_dltrace
    gc.disable()
    otel_dltrace.instrument()
    for _ in range(3):
        with otel_dltrace.step():
            gc.collect()
    otel_dltrace.uninstrument()
    assert gc.callbacks == []
    otel_dltrace.stop()
"""


@pytest.mark.parametrize("metrics", ["1", "0"])
def test_a_traced_program_s_pauses_reach_its_run_directory(metrics: str, place: Place) -> None:
    """Through the ring and the drain, where metrics are on; standard library alone in the process."""
    done = place.run(PROGRAM, OTEL_DLTRACE_METRICS=metrics)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    (batch,) = place.spans()
    generations = {name: values[mask] for name, values, mask in number_columns(batch)}.get(CPYTHON_GC_GENERATION, ())

    assert batch["step"][batch.is_pause].tolist() == ([0, 1, 2] if metrics == "1" else [])
    assert list(generations) == ([2, 2, 2] if metrics == "1" else [])
