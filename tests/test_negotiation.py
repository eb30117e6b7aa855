"""The report by negotiation: its share, who was ready last, what computation hides; real files and planted times."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from otel_dltrace.analysis.negotiation import (
    Activity,
    Negotiations,
    Overlap,
    ReadyRank,
    Share,
    TensorNegotiation,
    negotiations,
    union,
)
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.cli.main import main
from otel_dltrace.model import semconv as s
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.negotiation import write_negotiations
from tests.horovod_files import truth, unpack
from tests.runs import MS, Rank

STEPS, TENSORS = 10, ("allreduce.a", "allreduce.b")


def negotiated(late: float = 20.0, cached: int = 0, stages: bool = True) -> SpanBatch:
    """Return rank 0 of three: in each step of 100 ms two fused tensors are negotiated for 5 ms + *late*, reduced in 30.

    Rank 2 is ready *late* ms after rank 1; the last *cached* steps have no ticks. In the first step the
    negotiation begins 8 ms earlier.
    """
    rank = Rank(0, 3)
    for step in range(STEPS):
        begin, first = step * 100.0, step * 100.0 + (2 if step == 0 else 10)
        ready = begin + 15 + late
        rank.step(step, begin, begin + 100)
        if stages:
            rank.stage(step, "forward", begin, begin + 10).stage(step, "backward", begin + 10, ready + 20)
            rank.stage(step, "dataloader_next", ready + 20, ready + 40)
        for tensor in TENSORS:
            number = len(rank.rows) + 1
            _bar(rank, tensor, "NEGOTIATE_ALLREDUCE", step, first, ready)
            ticks = {0: first, 1: begin + 15, 2: ready} if step < STEPS - cached else {}
            for who, at in ticks.items():
                tick = Descriptor(s.TICK, "ready", backend="horovod", tensor=tensor)
                rank.add(tick, step, at, at, a=who, parent_no=number)
            _bar(rank, tensor, "ALLREDUCE", step, ready, ready + 30)
            _bar(rank, tensor, "MPI_ALLREDUCE", step, ready + 5, ready + 25)
    return rank.batch()


def _bar(rank: Rank, tensor: str, name: str, step: int, start: float, end: float) -> None:
    rank.add(Descriptor(s.PHASE, name, backend="horovod", tensor=tensor, activity=name), step, start, end)


def each(ms: float, count: int) -> Spread:
    ns = round(ms * MS)
    return Spread(count, count * ns, ns, ns, ns, ns)


def test_planted_times_are_found():
    """The share in the first step and the others, the rank planted late, tensors, activities, what is hidden."""
    found = negotiations([negotiated()])
    first = TensorNegotiation(
        "allreduce.a", "allreduce", Spread(10, 258 * MS, 25_800_000, 25 * MS, 29_400_000, 33 * MS), each(30, 10), 10, 2,
        10, 20 * MS,
    )  # fmt: skip

    assert found == Negotiations(
        whole=Share(10, 1000 * MS, 258 * MS, 300 * MS, 558 * MS),
        first=Share(1, 100 * MS, 33 * MS, 30 * MS, 63 * MS),
        others=Share(9, 900 * MS, 225 * MS, 270 * MS, 495 * MS),
        per_step=first.negotiation,
        overlap=Overlap(300 * MS, 550 * MS, 200 * MS),
        ticked=20,
        silent=0,
        ranks=(
            ReadyRank(0, 20, 0, Spread()),
            ReadyRank(1, 20, 0, Spread()),
            ReadyRank(2, 20, 20, each(20, 20)),
        ),
        tensors=(first, TensorNegotiation("allreduce.b", *list(_fields(first))[1:])),
        activities=(Activity("MPI_ALLREDUCE", each(20, 20), 200 * MS),),
    )


def _fields(value):
    return (getattr(value, name) for name in value.__dataclass_fields__)


def test_negotiations_without_ticks_are_counted_apart():
    """Horovod's cache says nothing of who was ready when; what was ticked is not mixed with it."""
    found = negotiations([negotiated(cached=4)])

    assert (found.ticked, found.silent) == (12, 8)
    assert found.ranks[2] == ReadyRank(2, 12, 12, each(20, 12))
    assert negotiations([negotiated(cached=STEPS)]).ranks == ()


def test_without_computation_nothing_is_said_of_overlap():
    """A timeline of Horovod has none; it is not taken for 0 %."""
    assert negotiations([negotiated(stages=False)]).overlap is None
    assert "cannot be told" in text(negotiations([negotiated(stages=False)]))


@pytest.mark.parametrize(
    ("extents", "length"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([(0, 5), (5, 9)], 9, id="touching"),
        pytest.param([(7, 9), (0, 5), (1, 3)], 7, id="nested"),
        pytest.param([(0, 4), (2, 6), (10, 10)], 6, id="overlapping"),
    ],
)
def test_what_extents_cover_together(extents, length):
    """Each moment counts once."""
    start, end = np.array(extents, np.int64).reshape(-1, 2).T

    assert union(start, end) == length


def text(found: Negotiations) -> str:
    console = Console(file=io.StringIO(), width=120)
    write_negotiations(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_says_it_in_words():
    """The share, who is ready last and by how much, and what computation hides."""
    assert text(negotiations([negotiated()])).splitlines()[:3] == [
        "Negotiation takes 46% of the time in which Horovod communicates: 258.0 of 558.0 ms.",
        "Rank 2 is ready last most often: in 20 of 20 negotiations, by 20.0 ms (p50).",
        "Computation hides 67% of the operations' time: forward, backward or optimizer ran in 200.0 of 300.0 ms.",
    ]
    assert text(negotiations([])).startswith("No operation of Horovod is in there")


def test_a_real_straggler_is_named(tmp_path, capsys):
    """Rank 1 slept before each of 20 steps: it is last in all 252 negotiations, by about as long as it slept."""
    run = tmp_path / "RUN"
    name = "horovod_mpi_np2_straggler_nocache"
    assert main(["import", "horovod", str(unpack(name, tmp_path)), "-o", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--by", "negotiation", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    slept = np.median([end - begin for _, begin, end in truth(name, 1)["sleeps"]]) * 1000
    rank0, rank1 = found["ranks"]

    assert (rank0["rank"], rank0["times"], rank1["rank"], rank1["times"], rank1["negotiations"]) == (0, 0, 1, 252, 252)
    assert (found["ticked"], found["silent"], found["whole"]["steps"]) == (252, 0, 20)
    assert abs(rank1["late"]["p50"] - slept) < 0.1 * slept


def test_the_command_reports_a_cached_run(tmp_path, capsys):
    """Most negotiations of a plain run do not say who was ready when, and the first step is told apart."""
    run = tmp_path / "RUN"
    assert main(["import", "horovod", str(unpack("horovod_mpi_np2", tmp_path)), "-o", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--by", "negotiation"]) == 0
    said = capsys.readouterr().out

    assert "in 24 of 24 negotiations" in said
    assert "(228 more do not say who was ready when)" in said
    assert "the first " in said
    assert "the others " in said
    assert "MPI_ALLREDUCE" in said
