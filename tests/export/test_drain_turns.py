"""The drain's turns: which rings it reads when, what it keeps of runs, and when it lets go of them."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from otel_dltrace.configure.drains import drain_for
from otel_dltrace.export import drain as drain_module
from otel_dltrace.export import follower
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.host_time import HostTime
from otel_dltrace.export.metrics.metering import Metering
from otel_dltrace.export.outgoing.departing import tags_of
from otel_dltrace.export.rings.cursor import Cursor
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.plan import Window
from otel_dltrace.model.time import Anchor
from otel_dltrace.record import guard
from otel_dltrace.record.ring_file import version_of
from otel_dltrace.settings.config import Config
from tests.support.processes import abandon
from tests.support.steps import ALONE, ONE_STEP, names

NAMES_A_TIMELINE = """
    import otel_dltrace as d
    from otel_dltrace.record.tracer import live
    d.start()
    for i in range(3):
        with d.step(i):
            pass
        live.tracer.recorder.follow("timeline.json")
"""


ON_DEMAND = """
    import sys
    import otel_dltrace as d
    d.start()
    for line in sys.stdin:
        for _ in range(int(line)):
            with d.step():
                pass
        print("written", flush=True)
"""


class Away:
    """A way out on whose disk spans wait."""

    def __init__(self) -> None:
        self.sent = self.spilled = 0

    def send(self, _batch, outgoing) -> None:
        """Have them wait."""
        self.spilled += sum(len(out.rows) for out in outgoing)
        self.sent += sum(len(out.rows) for out in outgoing)

    def figures(self, _run: Path) -> dict:
        """Return how many."""
        return {"otlp": {"sent": self.sent, "spilled": self.spilled}}

    def unsettled(self) -> set:
        """Return nothing."""
        return set()

    def spill_to(self, *_) -> None:
        """Do nothing."""

    flush = close = spill_to


class Slow(Away):
    """A way out that delivers nothing till it *is_fast*."""

    def __init__(self) -> None:
        super().__init__()
        self.is_fast, self._tags = False, set()

    def send(self, batch, outgoing) -> None:
        """Have them wait."""
        super().send(batch, outgoing)
        self._tags |= tags_of(batch, outgoing)

    def unsettled(self) -> set:
        """Return of what."""
        return set() if self.is_fast else self._tags


@pytest.fixture
def outlet():
    """Give none; a test that wants one says which."""


@pytest.fixture
def ticked(place, outlet, monkeypatch):
    """Give a drain whose clock is set by hand: ``at(s, n)`` has *n* steps written and ticks at *s*; rows so far."""
    env = place.env(OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RING_SIZE="256K", **ALONE)
    command = [sys.executable, str(place.write(ON_DEMAND))]
    pipe = subprocess.PIPE
    writer = subprocess.Popen(command, cwd=place.folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    seconds = 0.0
    clock = SimpleNamespace(monotonic=lambda: seconds, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
    monkeypatch.setattr(drain_module, "time", clock)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0, delay=5.0), outlet)

    def at(now: float, steps: int) -> int:
        nonlocal seconds
        seconds = now
        writer.stdin.write(f"{steps}\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "written\n"
        drain.tick()
        return sum(writer.rows for writer in drain.runs.writers.values())

    at.drain = drain
    yield at
    writer.communicate()
    while drain.followers:
        drain.tick()
    drain.finish()


def test_where_nothing_goes_out_nothing_is_kept_to_be_sent_again(ticked):
    """The last step has not been decided where spans go out; here the cursor says that all of them are delivered."""
    ticked(0.0, 10)
    ticked(5.0, 10)
    (cursor,) = [Cursor.read(path) for path in ticked.drain.serving.rings.glob("*.cursor")]

    assert [(place.undelivered, place.loose) for place in cursor.places.values()] == [(NO_STEP, False)]


@pytest.mark.parametrize("outlet", [Slow()])
def test_what_is_delivered_between_two_reads_is_not_sent_again(ticked, outlet):
    """The cursor says so in the next turn; one in which nothing is delivered writes none."""

    def after(now: float, steps: int) -> tuple[int, object]:
        ticked(now, steps)
        (path,) = ticked.drain.serving.rings.glob("*.cursor")
        (place,) = Cursor.read(path).places.values()
        return place.undelivered, version_of(path)

    first, waits = after(0.0, 10), after(1.0, 0)
    outlet.is_fast = True
    delivered, nothing_new = after(2.0, 0), after(3.0, 0)

    assert (first[0], delivered[0]) == (0, 9)  # the last step is not decided
    assert (waits, nothing_new) == (first, delivered)


@pytest.mark.parametrize("outlet", [Slow()])
def test_what_a_drain_had_read_and_delivered_is_known_when_it_is_killed(ticked, place, outlet):
    """Once its cursor says that it is not sent again; the next drain adds what it sends itself."""
    ticked(1.0, 10)
    outlet.is_fast = True
    ticked(2.0, 0)
    (told,) = (summary for run in place.runs() for summary in read_summaries(run))

    assert told["so_far"] == 10
    assert told["summary"]["otlp"]["sent"] == 18  # nine steps and their roots: the last one is not decided


@pytest.mark.parametrize("together", [1, 1 << 20])
def test_every_ring_is_read_however_many_there_are(place, monkeypatch, together):
    """So many are read together as memory has room for, and the others after them."""
    monkeypatch.setattr(drain_module, "TOGETHER", together)
    for _ in range(3):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", **ALONE).returncode == 0
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    drain.run()

    assert [len(batch) for run in place.runs() for batch in read_run(run)] == [1, 1, 1]


@pytest.fixture
def staying(place, outlet, monkeypatch):
    """Give a drain that stays: ``after(s)`` is what it has open of runs, and which of them say that they have ended."""
    seconds = 0.0
    clock = SimpleNamespace(monotonic=lambda: seconds, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
    monkeypatch.setattr(drain_module, "time", clock)
    drain = Drain(Serving(place.rings, place.folder, linger=float("inf"), delay=0.0), outlet)

    def after(now: float) -> tuple[int, list[bool]]:
        nonlocal seconds
        seconds = now
        drain.tick()
        opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        told = [json.loads(path.read_text())["ended"] for path in place.folder.glob("dltrace-*/hosts/*/drain.json")]
        return sum(path.startswith(f"{place.folder}/dltrace-") for path in opened), told

    yield after
    drain.finish()


def test_a_drain_that_stays_lets_go_of_the_runs_that_have_ended(place, staying):
    """Some seconds after their last rings: of a sweep of thousands it had three files of each open, and no Parquet.

    One in a turn, since meanwhile no ring is read.
    """
    for _ in range(3):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", **ALONE).returncode == 0

    assert staying(0.0) == (9, [False] * 3)
    assert staying(4.0) == (9, [False] * 3)
    assert [(files, sum(ended)) for files, ended in map(staying, (6.0, 7.0, 8.0))] == [(6, 1), (3, 2), (0, 3)]
    assert [path.suffix for path in place.folder.glob("dltrace-*/hosts/*/s*")] == [".parquet"] * 3


def test_a_run_whose_ranks_come_again_is_taken_up_again(place, staying):
    """Its figures go on."""
    for now in (0.0, 10.0):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RUN="one", **ALONE).returncode == 0
        assert staying(now) == (3, [False])
        assert staying(now + 6.0) == (0, [True])

    (run,) = place.runs()
    (told,) = read_summaries(run)
    assert (told["summary"]["processes"], told["summary"]["spans"]) == (2, 2)
    assert [len(batch) for batch in read_run(run)] == [1, 1]


def test_a_run_goes_on_while_ranks_come_and_go(place, staying):
    """However short each is: else there would be a Parquet for each."""
    for now in (0.0, 4.0, 8.0):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RUN="one", **ALONE).returncode == 0
        assert staying(now) == (3, [False])

    assert staying(13.0) == (0, [True])
    assert [path.suffix for path in place.folder.glob("dltrace-*/hosts/*/s*")] == [".parquet"]


@pytest.mark.parametrize("outlet", [Away()])
def test_a_run_whose_spans_wait_on_disk_is_finished_and_kept(place, staying, outlet):
    """Its folder is the drain's until they are sent, and its figures say so then; those of the next time are added."""
    for now in (0.0, 20.0):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RUN="one", **ALONE).returncode == 0
        staying(now)
        assert staying(now + 6.0)[1] == [False]
        assert [path.suffix for path in place.folder.glob("dltrace-*/hosts/*/s*")][:1] == [".parquet"]
        outlet.spilled = 0
        assert staying(now + 7.0) == (0, [True])

    (told,) = (summary["summary"]["otlp"] for run in place.runs() for summary in read_summaries(run))
    assert told == {"sent": 4, "spilled": 0}  # each time a step and its root


def test_rings_are_read_together_every_few_seconds(ticked):
    """At once at first, and when the delay is over: then with every step that has ended, and no stage to wait for."""
    assert [ticked(now, 10) for now in (0.0, 1.0, 4.9, 5.0, 9.9, 10.0)] == [10, 10, 10, 40, 40, 60]


@pytest.mark.parametrize(("samples", "known"), [(False, [0, 0, 1]), (True, [0, 1, 1])], ids=["spans", "metrics"])
def test_who_a_rank_is_that_is_sampled_is_read_at_once(ticked, samples, known):
    """It has its samples from then on, not from the next time on that all rings are read."""
    ticked.drain.metering = Metering(None, samples, Window.parse("all"), quota=1 << 30)
    found = []
    for now, steps in ((0.0, 1), (1.0, 9), (5.0, 9)):
        ticked(now, steps)
        found.append(sum(len(follower.members) for follower in ticked.drain.followers.values()))

    assert found == known


def test_a_ring_that_fills_is_read_before_its_time(ticked):
    """A quarter of it is not left there: of a drain that is killed the next one finds all that it had not passed on."""
    assert [ticked(now, steps) for now, steps in ((0.0, 10), (1.0, 200), (2.0, 400), (3.0, 10))] == [10, 10, 610, 610]


def test_what_a_ring_has_lost_is_known_to_the_drain_after_a_killed_one(ticked, place):
    """It counts what it loses itself, and takes over what its predecessor had counted."""
    first = ticked.drain
    assert ticked(0.0, 10) < ticked(10.0, 4000) < 4010
    ((path, before),) = first.followers.items()
    abandon(first)

    second = Drain(Serving(place.rings, place.folder, linger=0.0))
    second.tick()
    assert second.followers[path].source.lapped == before.source.lapped != [0] * 5
    abandon(second)
    first.followers.clear()


def test_a_drain_goes_on_with_the_clock_of_the_killed_one(ticked, place, monkeypatch):
    """A span that is sent again is the same to the ns: a back end shows it once."""
    first = ticked.drain
    assert ticked(0.0, 10) == 10
    before = first.time.anchor
    abandon(first)

    monkeypatch.setattr(HostTime, "_read", lambda _: Anchor(0, before.offset + 500, 0))
    second = Drain(Serving(place.rings, place.folder, linger=0.0))
    second.tick()
    assert [member.process.anchor for f in second.followers.values() for member in f.members] == [before]
    abandon(second)
    first.followers.clear()


@pytest.mark.parametrize(
    ("said", "delay"), [pytest.param("250", 0.25, id="as told"), pytest.param("often", 5.0, id="not a number")]
)
def test_how_long_spans_wait_is_a_variable_of_the_sdk(monkeypatch, capsys, place, said, delay):
    """One that cannot be used is told of, and spans go on."""
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", said)
    made = drain_for(Config(ring_directory=str(place.rings)), None)
    made.finish()

    assert made.serving.delay == delay
    assert capsys.readouterr().err.count("OTEL_BSP_SCHEDULE_DELAY='often' is not a number") == (said == "often")


def test_a_wall_clock_that_is_set_back_is_told_of_once(place, monkeypatch, capsys):
    """What goes out later has the new time; a clock that is kept in step moves by less, and says nothing."""
    monkeypatch.setattr(guard, "_said", set())
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    offset, said = drain.time.anchor.offset, []
    for moved_ms in (0, 20, -3_600_000, -7_200_000):
        monkeypatch.setattr(drain.time, "_read", lambda: Anchor(0, offset + moved_ms * 1_000_000, 0))  # noqa: B023
        drain.tick()
        said.append((drain.time.anchor.offset - offset, capsys.readouterr().err.count("was set back by 3600.0 s")))
    drain.finish()

    assert said == [(0, 0), (20_000_000, 0), (-3_600 * 10**9, 1), (-7_200 * 10**9, 0)]


def test_a_timeline_that_cannot_be_joined_costs_no_spans(place, monkeypatch, capsys):
    """The descriptors that an earlier drain wrote are damaged: the process's own spans go on, and its ring goes."""
    place.run(NAMES_A_TIMELINE, OTEL_DLTRACE_DRAIN="off")

    def damaged(_folder: Path) -> None:
        raise pa.ArrowInvalid("not an Arrow file")

    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setattr(follower, "read_descriptors", damaged)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    drain.run()
    (batch,) = place.spans()

    assert names(batch) == ["rank.step"] * 3
    assert (drain.rings.refused, list(place.rings.glob("*.ring"))) == ({}, [])
    assert capsys.readouterr().err.count("Follower._join failed and is not traced (ArrowInvalid") == 1
