"""The gate: what of each step goes out over OTLP, and the roots above."""

import numpy as np
import pytest

from otel_dltrace.export.outgoing import gate as gate_module
from otel_dltrace.export.outgoing.budget import StepBudget
from otel_dltrace.export.outgoing.gate import LOST_STEPS, MOST_FAILED, SETTLE_S, Outgoing, StepGate
from otel_dltrace.export.outgoing.roots import Roots
from otel_dltrace.export.rings.drift import REMEMBERED, Drift
from otel_dltrace.model.identity import NO_STEP, Bind, root_id
from otel_dltrace.model.plan import Window, share_of
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.spans import Process, empty_rows

BIND = Bind("job", "1.00")
MS = 1_000_000


def step_rows(step: int, phases: int = 3, took: int = 10, seq: int = 0, start: int | None = None) -> np.ndarray:
    """Return a step: its own span first, a stage, an operation, and *phases* phases."""
    rows = empty_rows(3 + phases)
    begin = step * 100 * MS if start is None else start
    rows["step"], rows["start"], rows["end"], rows["seq"] = step, begin, begin + took * MS, seq
    rows["level"] = [Level.STEP, Level.STEP, Level.COLLECTIVE, *[Level.PHASE] * phases]
    rows["span_no"] = step * 1000 + np.arange(len(rows))
    return rows


def add(gate: StepGate, rows: np.ndarray, now: float, ends: bool = True) -> None:
    """Give *rows* to the gate; the first is the step's own span where it *ends*."""
    gate.add(rows, (np.arange(len(rows)) == 0) & ends, now)


def a_gate(window: str = "all", budget: int = 0, bind: Bind = BIND) -> StepGate:
    """Return a gate that has nothing to read again."""

    def read_again(step: int) -> np.ndarray:
        raise AssertionError(step)

    return StepGate(bind, Window.parse(window), budget, read_again)


def brief(decided: list[Outgoing]) -> list[tuple[int, int, int]]:
    """Return step, spans and spans left out of each."""
    return [(out.step, len(out.rows), out.left_out) for out in decided]


def test_a_step_goes_out_once_the_next_has_ended():
    """Or two seconds after its own end: once, all of it."""
    gate = a_gate()
    add(gate, step_rows(0), 0.0)
    assert gate.due(0.1) == []
    assert gate.undecided_from() == 0

    add(gate, step_rows(1), 0.2)

    assert brief(gate.due(0.3)) == [(0, 6, 0)]
    assert gate.due(0.4) == []
    assert gate.undecided_from() == 1
    assert brief(gate.due(0.2 + SETTLE_S)) == [(1, 6, 0)]
    assert gate.undecided_from() == NO_STEP


def test_outside_the_window_steps_and_stages_go_out():
    """What was left out is counted."""
    gate = a_gate("first=1,every=3")
    for step in range(5):
        rows = step_rows(step)
        rows["flags"][2:] = Flag.ASYNC  # which is no failure
        add(gate, rows, 0.0)

    assert brief(gate.due(0.0, final=True)) == [(0, 6, 0), (1, 2, 4), (2, 2, 4), (3, 6, 0), (4, 2, 4)]


def test_a_slow_step_goes_out_in_full_after_the_fact():
    """More than 1.5 times the median of the last 50."""
    gate = a_gate("0-0")
    for step in range(10):
        add(gate, step_rows(step, took=16 if step == 7 else 15 if step == 8 else 10), 0.0)

    assert [step for step, spans, _ in brief(gate.due(0.0, final=True)) if spans == 6] == [0, 7]


@pytest.mark.parametrize("flag", [Flag.ERROR, Flag.TRUNCATED])
def test_a_step_that_failed_goes_out_in_full_a_hundred_times(flag):
    """Whether it was slow or not, in the window or not."""
    gate = a_gate("0-0")
    for step in range(MOST_FAILED + 10):
        rows = step_rows(step)
        rows["flags"][4] = flag if step % 2 == 0 or step > 20 else 0
        add(gate, rows, 0.0)
    full = [step for step, spans, _ in brief(gate.due(0.0, final=True)) if spans == 6]

    assert full == [step for step in range(MOST_FAILED + 10) if step % 2 == 0 or step > 20][: MOST_FAILED + 1]


def test_the_budget_leaves_out_the_finest_levels_first():
    """Partitions, then phases, then operations; never a stage."""
    rows = step_rows(0, phases=4)
    rows["level"][-2:] = Level.PARTITION

    assert [len(StepBudget().within(0, rows, limit)) for limit in (7, 6, 5, 4, 3, 2, 1)] == [7, 5, 5, 3, 3, 2, 2]


def test_what_was_below_a_span_that_is_left_out_hangs_higher():
    """An operation in a phase of a phase, as a program marks them: all three parents are there, or none is named."""
    rows = step_rows(0, phases=2)
    step, _, operation, outer, inner = ids = [10, 11, 12, 13, 14]
    rows["span_id"], rows["parent_id"] = ids, [1, step, inner, step, outer]

    kept = StepBudget().within(0, rows, 3)

    assert kept["span_id"].tolist() == [10, 11, operation]
    assert kept["parent_id"].tolist() == [1, step, step]
    assert rows["parent_id"].tolist() == [1, step, inner, step, outer]


def test_what_is_kept_stays_where_it_is():
    """An operation within another, as a list of tensors is gathered: both have room, and the phase in them has not."""
    rows = step_rows(0, phases=2)
    rows["level"][3] = Level.COLLECTIVE
    rows["span_id"], rows["parent_id"] = [10, 11, 12, 13, 14], [1, 10, 11, 12, 13]

    assert StepBudget().within(0, rows, 4)["parent_id"].tolist() == [1, 10, 11, 12]


def test_what_the_budget_leaves_out_is_counted():
    """One of two ranks is in full, their turn moves, and every span is sent or counted."""
    window = 40
    binds = [Bind("job", "1.00", rank=rank, world_size=2) for rank in range(2)]
    sent = []
    for bind in binds:
        gate = a_gate(budget=2100, bind=bind)
        for step in range(window):
            add(gate, step_rows(step, phases=2500), 0.0)
        sent.append(brief(gate.due(0.0, final=True)))

    for one, other in zip(*sent, strict=True):
        assert sorted([one[1], other[1]]) == [2, 3]  # 2,503 spans are more than a rank's 2,068: no phase goes out
        assert one[1] + one[2] == other[1] + other[2] == 2503
    assert {one[1] for one in sent[0]} == {2, 3}


def test_a_late_row_follows_its_step_and_is_counted():
    """In full where the step was, else only if it is a stage."""
    gate = a_gate("0-0")
    for step in (0, 1, 2):
        add(gate, step_rows(step), 0.0)
    gate.due(0.0)

    add(gate, step_rows(0)[2:], 0.1, ends=False)
    add(gate, step_rows(1)[1:], 0.1, ends=False)

    assert brief(gate.due(0.1)) == [(0, 4, 0), (1, 1, 4)]
    assert gate.late == 9


def test_late_rows_stay_within_the_budget():
    """Also those of operations that end steps later than they began."""
    gate = a_gate(budget=16 + 10)
    for step in (0, 1):
        add(gate, step_rows(step, phases=5), 0.0)
    assert brief(gate.due(0.0)) == [(0, 8, 0)]

    for _ in range(3):
        add(gate, step_rows(0, phases=0)[2:], 0.1, ends=False)

    assert brief(gate.due(0.1)) == [(0, 1, 0), (0, 1, 0), (0, 0, 1)]
    assert gate.late == 3


def test_what_comes_late_hangs_higher_too():
    """Its phase was left out, with the step or late itself; an operation that ends after it still has a parent."""
    gate = a_gate(budget=16 + 5)
    rows = step_rows(0, phases=3)
    step, stage, operation, outer, inner, _ = rows["span_id"] = [10, 11, 12, 13, 14, 15]
    rows["parent_id"] = [1, step, stage, stage, outer, outer]
    late, later, last = step_rows(0, phases=0)[2:], step_rows(0, phases=3)[3:], step_rows(0, phases=0)[2:]
    late["span_id"], late["parent_id"] = 20, inner
    later["span_id"], later["parent_id"] = [21, 22, 23], inner
    last["span_id"], last["parent_id"] = 24, 22
    sent = []
    for part, ends in ((rows, True), (step_rows(1), True), (late, False), (later, False), (last, False)):
        add(gate, part, 0.0, ends)
        sent += [out.rows[["span_id", "parent_id"]].tolist() for out in gate.due(0.0)]

    assert sent == [[(step, 1), (stage, step), (operation, stage)], [(20, stage)], [], [(24, stage)]]


def test_a_row_that_comes_thousands_of_steps_late_is_not_held_for_ever():
    """What was decided is forgotten by then, but not that it was."""
    gate = a_gate("5-5")
    for step in range(3000):
        add(gate, step_rows(step, phases=0), 0.0)
        gate.due(0.0)

    add(gate, step_rows(5)[2:], 0.1, ends=False)
    add(gate, step_rows(6)[2:], 0.1, ends=False)

    assert brief(gate.due(0.1)) == [(5, 4, 0), (6, 0, 4)]
    assert gate.undecided_from() == 2999


def test_what_comes_to_a_step_that_is_held_goes_out_with_it():
    """Be those behind it decided: its own span may be read after theirs, and still says that it is over."""
    gate = a_gate()
    add(gate, step_rows(0)[1:], 0.0, ends=False)
    add(gate, step_rows(1), 0.0)
    add(gate, step_rows(2), 0.0)
    assert brief(gate.due(0.0)) == [(1, 6, 0)]

    add(gate, step_rows(0)[:1], 0.1)

    (whole,) = gate.due(0.1)
    assert (brief([whole]), whole.stepless, whole.extent) == ([(0, 6, 0)], False, (0, 10 * MS))
    assert gate.late == 0


def test_a_step_whose_own_span_was_overwritten_is_given_up():
    """Its rows go out under nothing, and the cursor moves on."""
    gate = a_gate()
    add(gate, step_rows(0)[1:], 0.0, ends=False)
    for step in range(1, LOST_STEPS + 1):
        add(gate, step_rows(step), 0.0)
        decided = gate.due(0.0)
        assert [out.step for out in decided if out.stepless] == ([0] if step == LOST_STEPS else [])
    assert gate.undecided_from() == LOST_STEPS


def test_evaluation_after_the_last_step_goes_out_stepless():
    """It belongs to a step that never comes, so there is nothing for it to hang under."""
    gate = a_gate()
    add(gate, step_rows(0), 0.0)
    add(gate, step_rows(1)[1:2], 0.0, ends=False)

    assert [(out.step, out.stepless, out.extent) for out in gate.due(10.0)] == [(0, False, (0, 10 * MS))]
    assert gate.due(10.0) == []
    assert [(out.step, out.stepless, out.extent) for out in gate.due(10.0, final=True)] == [(1, True, None)]


def test_rows_outside_any_step_go_out_after_two_seconds():
    """Programs without steps are released span by span."""
    gate = a_gate()
    rows = step_rows(0)[2:]
    rows["step"] = NO_STEP
    add(gate, rows, 1.0, ends=False)

    assert gate.due(1.0 + SETTLE_S / 2) == []
    assert gate.has_loose
    assert brief(gate.due(1.0 + SETTLE_S)) == [(NO_STEP, 4, 0)]
    assert not gate.has_loose


@pytest.mark.parametrize("window", ["all", "900-901"])
def test_beyond_the_limit_details_are_read_again(monkeypatch, window):
    """Memory holds the stages; what goes out, and what is counted as left out, is the same."""
    monkeypatch.setattr(gate_module, "MAX_HELD", 100)
    stored = {step: step_rows(step, phases=40) for step in range(4)}
    read: list[int] = []

    def read_again(step: int) -> np.ndarray:
        read.append(step)
        return stored[step]

    gate = StepGate(BIND, Window.parse(window), 0, read_again)
    for rows in stored.values():
        add(gate, rows, 0.0)

    full = window == "all"
    assert brief(gate.due(0.0, final=True)) == [(step, 43 if full else 2, 0 if full else 41) for step in stored]
    assert bool(read) == full


# -- roots -------------------------------------------------------------------------------------


class FakeMember:
    """A local rank, as far as roots look at it."""

    def __init__(self, rank: int) -> None:
        self.bind = Bind("job", "1.00", rank=rank, world_size=2)
        self.process = Process(rank + 1, self.bind)


def spans_of(roots: list) -> list[tuple[int, int, int, int]]:
    """Return step, shard, start and end of each."""
    return [(root.step, root.shard, int(root.row["start"][0]), int(root.row["end"][0])) for root in roots]


def test_a_root_covers_its_local_ranks_once_all_have_decided():
    """Its id is the one that every rank computes."""
    roots = Roots(BIND)
    roots.add(FakeMember(0), 3, 0, (10, 50), 0.0)
    assert roots.due(2, 0.1, final=False) == []
    assert roots.pending_from() == 3

    roots.add(FakeMember(1), 3, 0, (5, 40), 0.1)
    due = roots.due(2, 0.1, final=False)

    assert spans_of(due) == [(3, 0, 5, 50)]
    assert int(due[0].row["span_id"][0]) == root_id(BIND, 3)
    assert roots.pending_from() == NO_STEP
    roots.add(FakeMember(1), 3, 0, (5, 90), 0.2)
    assert roots.due(2, 9.0, final=True) == []


def test_a_root_waits_two_seconds_for_a_rank_that_does_not_come():
    """Or until the last ring is read."""
    roots = Roots(BIND)
    for step in (0, 1):
        roots.add(FakeMember(0), step, 0, (10, 50), float(step))

    assert spans_of(roots.due(2, SETTLE_S, final=False)) == [(0, 0, 10, 50)]
    assert spans_of(roots.due(2, SETTLE_S, final=True)) == [(1, 0, 10, 50)]


def test_a_root_waits_as_long_as_a_rank_stands_in_its_step():
    """One that writes a checkpoint for minutes is a part of the step, and not of those after it."""
    roots = Roots(BIND)
    for step in (0, 1):
        roots.add(FakeMember(1), step, 0, (10, 50), 0.0)
    roots.add(FakeMember(0), 0, 0, (10, 50), 0.0)
    roots.due(2, 0.0, final=False)
    assert roots.due(2, 9 * SETTLE_S, final=False, standing={1}) == []

    roots.add(FakeMember(0), 1, 0, (15, 900), 9 * SETTLE_S)

    assert spans_of(roots.due(2, 9 * SETTLE_S, final=False)) == [(1, 0, 10, 900)]


def test_a_rank_0_that_is_read_last_owns_the_steps_before_it():
    """Those of ranks that ended before it was known are covered, too."""
    roots = Roots(BIND)
    roots.add(FakeMember(1), 0, 0, (5, 40), 0.0)
    assert roots.due(1, 0.0, final=False) == []

    roots.add(FakeMember(0), 0, 0, (10, 50), 60.0)

    assert spans_of(roots.due(1, 60.0, final=False)) == [(0, 0, 5, 50)]


def test_without_rank_0_there_is_no_root_here():
    """Its host's drain sends it."""
    roots = Roots(BIND)
    roots.add(FakeMember(1), 0, 0, (10, 50), 0.0)

    assert roots.due(1, 0.0, final=False) == []
    assert roots.pending_from() == NO_STEP


def test_each_shard_has_a_root_of_its_own():
    """A very large world's step is several traces."""
    shards = [share_of(rank, 4, 0, 40, 0).shard for rank in range(4)]
    assert shards == [0, 0, 1, 1]
    roots = Roots(BIND)
    for rank, shard in enumerate(shards):
        roots.add(FakeMember(rank), 0, shard, (10, 50), 0.0)

    due = roots.due(4, 0.0, final=False)

    assert spans_of(due) == [(0, 0, 10, 50), (0, 1, 10, 50)]
    assert [int(root.row["span_id"][0]) for root in due] == [root_id(BIND, 0, shard) for shard in (0, 1)]


# -- drift -------------------------------------------------------------------------------------


def test_a_step_that_ranks_began_at_different_numbers_is_counted_once():
    """A number that is not known is compared with nothing."""
    drift = Drift()
    said = [(0, 0), (0, 7), (1, 9), (1, 9), (2, 11), (2, 12), (2, 13), (3, 14), (3, 0)]

    assert [step for step, seq in said if drift.is_news(step, seq)] == [2]


def test_drift_forgets_what_is_long_past():
    """A month of steps is not a month of memory."""
    drift = Drift()
    for step in range(2 * REMEMBERED):
        drift.is_news(step, step + 1)

    assert not drift.is_news(0, 99)
    assert drift.is_news(2 * REMEMBERED - 1, 1)


def test_the_gate_hands_on_the_number_at_which_a_step_began():
    """It is the step span's own."""
    gate = a_gate()
    add(gate, step_rows(0, seq=17), 0.0)

    assert [out.seq for out in gate.due(0.0, final=True)] == [17]
