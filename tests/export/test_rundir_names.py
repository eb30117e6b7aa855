"""Spans whose run is not known yet, or is known again: they wait, come back once, and are counted once."""

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.export import follower, member
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.follower import Follower
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rundir import writer as rundir
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.export.rundir.span_files import span_files
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.export.serving import Serving
from tests.support import servers
from tests.support.processes import Place, abandon

LATE = """
    import os, sys, time
    import otel_dltrace as d
    from otel_dltrace.model.identity import Bind
    from otel_dltrace.record.tracer import live

    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.005)

    def spans(first, last):
        for i in range(first, last):
            with d.step(i):
                with d.phase("work", size=i):
                    pass

    d.start()
    spans(0, 10)
    print("ready", flush=True)
    wait_for("bind")
    live.tracer.recorder.bind(Bind("job", "1.00", "demo", rank=0, world_size=2))
    spans(10, 20)
    print("bound", flush=True)
    wait_for("again")
    live.tracer.recorder.bind(Bind("job", "2.00", "demo", rank=0, world_size=2))
    spans(20, 30)
"""
LATE_ENV = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OTEL_DLTRACE_DRAIN": "off"}


def ticks(drain: Drain, count: int = 4) -> None:
    """Let *drain* look as often as it takes to see, take, and let go of everything."""
    for _ in range(count):
        drain.hurry = True  # else rows are made every few seconds
        drain.tick()


def sizes(run: Path) -> list[int]:
    """Return the numbers that the spans called work carry, sorted."""
    (batch,) = read_run(run)
    return sorted(batch["size"][batch.lookup(lambda d: d.name == "work", bool)].tolist())


def test_who_asks_for_everything_has_unbound_rows_written_too(place):
    """A program that has no name before its end would else be told that nothing is read, whenever it flushes."""
    process = place.start(LATE, **LATE_ENV)
    assert process.stdout.readline() == "ready\n"
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    ticks(drain, 1)
    (partial,) = place.folder.glob(".dltrace-*.partial")
    cursors = [*place.rings.glob("*.cursor")]
    abandon(drain)

    assert sizes(partial) == list(range(10))
    assert len(cursors) == 1


@pytest.mark.parametrize("killed", [False, True], ids=["one drain", "killed in between"])
def test_unbound_rows_wait_in_a_partial_directory_and_come_back_once(place, monkeypatch, killed):
    """Bound again, as after an elastic restart in the same process, the rows that follow go to another directory."""
    monkeypatch.setattr(follower, "KEEP_S", 0.0)
    process = place.start(LATE, **LATE_ENV)
    assert process.stdout.readline() == "ready\n"
    serving = Serving(place.rings, place.folder, linger=0.0)
    drain = Drain(serving)
    ticks(drain)
    (partial,) = place.folder.glob(".dltrace-*.partial")
    assert sizes(partial) == list(range(10))
    assert place.runs() == []
    if killed:  # after the rows were written, before the cursor was
        for cursor in place.rings.glob("*.cursor"):
            cursor.unlink()
        abandon(drain)
        drain = Drain(serving)

    (place.folder / "bind").touch()
    assert process.stdout.readline() == "bound\n"
    ticks(drain)
    assert list(place.folder.glob(".dltrace-*")) == []
    if killed:
        abandon(drain)
        drain = Drain(serving)
    (place.folder / "again").touch()
    process.communicate(timeout=240)
    drain.run()

    first, second = sorted(place.runs(), key=lambda run: read_run(run)[0].process.bind.generation)
    # The second bind holds from the step that is current then; what was there of it has been written.
    assert (sizes(first), sizes(second)) == (list(range(20)), list(range(20, 30)))
    for run in (first, second):
        (batch,) = read_run(run)
        assert len(np.unique(batch["span_id"])) == len(batch)
    assert list(place.rings.glob("*.ring")) == []
    assert sum(summary["summary"]["spans"] for run in place.runs() for summary in read_summaries(run)) == 60


NAMELESS = """
    import sys
    import otel_dltrace as d
    d.start()
    for turn, _ in enumerate(sys.stdin):
        for i in range(2000):
            with d.phase("work", size=2000 * turn + i):
                pass
        print("written", flush=True)
"""


def nameless(place: Place, drain: Drain, turns: int) -> Path:
    """Have a process write 2,000 spans before each of *turns* of *drain*, and end; return where they wait."""
    pipe, env = subprocess.PIPE, place.env(**LATE_ENV)
    command = [sys.executable, str(place.write(NAMELESS))]
    process = subprocess.Popen(command, cwd=place.folder, env=env, stdin=pipe, stdout=pipe, text=True)
    place.children.append(process)
    for _ in range(turns):
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "written\n"
        ticks(drain, 1)
    process.communicate(timeout=240)
    (partial,) = place.folder.glob(".dltrace-*.partial")
    return partial


def test_what_waits_for_a_name_is_within_the_quota(place, monkeypatch):
    """The oldest went, and are counted: a process may have its name at its end alone, after days."""
    monkeypatch.setattr(rundir, "SEGMENT_BYTES", 1)  # one for each turn
    drain = Drain(Serving(place.rings, place.folder, linger=0.0, quota=200_000))
    partial = nameless(place, drain, 20)
    size = sum(path.stat().st_size for path in partial.glob("hosts/*/s*"))
    drain.run()

    (run,) = place.runs()
    (told,) = read_summaries(run)
    kept = sizes(run)
    assert size <= 200_000  # of four million
    assert (len(kept) + told["summary"]["dropped_by_quota"], kept[-1]) == (40_000, 39_999)
    assert kept == list(range(kept[0], 40_000))


@pytest.mark.parametrize("killed", ["", "behind the cursor", "before the cursor"])
def test_what_waited_for_a_name_comes_back_file_by_file(place, monkeypatch, killed):
    """All of it may be more than there is memory; a drain that is killed meanwhile doubles and loses nothing."""
    monkeypatch.setattr(rundir, "SEGMENT_BYTES", 1)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    partial = nameless(place, drain, 8)
    left = []
    for _ in range(2):
        before = {path: path.read_bytes() for path in place.rings.glob("*.cursor")}
        drain.tick()
        left.append(len(span_files(next(partial.glob("hosts/*")))))
        if killed:
            abandon(drain)
            for path, cursor in before.items() if killed == "before the cursor" else ():
                path.write_bytes(cursor)
            drain = Drain(drain.serving)
    drain.run()

    (run,) = place.runs()
    assert left == [3, 2]
    assert sizes(run) == list(range(16_000))
    assert [summary["summary"]["spans"] for summary in read_summaries(run)] == [16_000]
    assert list(place.folder.glob(".dltrace-*")) + list(place.rings.glob("*.ring")) == []


def test_a_file_that_waited_for_a_name_and_is_damaged_is_put_aside(place, monkeypatch, capfd):
    """What else waited comes back, and nobody removes what might be mended."""
    monkeypatch.setattr(rundir, "SEGMENT_BYTES", 1)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    partial = nameless(place, drain, 8)
    damaged = min(partial.glob("hosts/*/*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    drain.run()

    (aside,) = partial.glob("hosts/*/*.damaged")
    assert (aside.stem, f"{aside} is damaged" in capfd.readouterr().err) == (damaged.name, True)
    (run,) = place.runs()
    lost = sorted({*range(16_000)} - {*(kept := sizes(run))})
    assert (len(kept), lost) == (12_000, list(range(lost[0], lost[0] + 4000)))  # a file is of two segments


def test_a_drain_ends_where_what_waited_for_a_name_finds_no_room(place, monkeypatch, capfd):
    """The writer is gone, and the disk is full for good: ring and spans stay where they are, for `recover`."""
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    partial = nameless(place, drain, 3)
    with monkeypatch.context() as now:
        now.setattr(RunWriter, "_append", no_room)
        drain.run()
    assert "cannot be emptied into its run directory" in capfd.readouterr().err
    assert (partial.exists(), len([*place.rings.glob("*.ring")])) == (True, 1)

    Drain(Serving(place.rings, place.folder, linger=0.0)).run()
    assert sizes(*place.runs()) == list(range(6000))


def no_room(*_: object) -> None:
    """Be a disk that is full."""
    raise OSError(errno.ENOSPC, "No space left on device")


class Taker:
    """A way out that has everything at once."""

    def __init__(self) -> None:
        self.sent: set[int] = set()
        self.times: list[int] = []

    def send(self, _batch, outgoing) -> None:
        """Note the steps."""
        self.times += [out.step for out in outgoing]
        self.sent.update(self.times)

    def unsettled(self) -> set:
        """Return nothing."""
        return set()

    def figures(self, _run: Path) -> dict:
        """Return nothing."""
        return {}

    def spill_to(self, *_: Path) -> None:
        """Do nothing."""

    flush = close = spill_to


def test_what_was_sent_of_an_earlier_generation_is_not_sent_again(place, monkeypatch):
    """The drain is killed when all has left, but for the ring: the next one has nothing to send, of no generation."""
    process = place.start(LATE, **LATE_ENV)
    for name in ("bind", "again"):
        (place.folder / name).touch()
    process.communicate(timeout=240)
    first, second = (Drain(Serving(place.rings, place.folder, linger=0.0), Taker()) for _ in range(2))
    monkeypatch.setattr(first, "_let_go", lambda _path: None)
    first.tick()
    abandon(first)
    second.run()

    told = [summary["summary"]["spans"] for run in place.runs() for summary in read_summaries(run)]
    assert (first.outlet.sent, second.outlet.sent) == (set(range(30)), set())
    assert (len(told), sum(told)) == (2, 60)


def test_what_a_drain_had_that_was_killed_while_it_kept_the_quota_is_counted_once(place, monkeypatch):
    """All is Parquet by then, in which rows are sorted, and the ring is still there."""
    process = place.start(LATE.replace("2.00", "1.00"), **LATE_ENV)
    for name in ("bind", "again"):
        (place.folder / name).touch()
    process.communicate(timeout=240)
    first, second = (Drain(Serving(place.rings, place.folder, linger=0.0, quota=1)) for _ in range(2))

    def killed(follower: Follower, **_: object) -> None:
        follower.source.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(first.runs, "count", killed)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second.run()

    (told,) = read_summaries(place.runs()[0])
    assert told["summary"]["spans"] == 60


def test_a_ring_that_a_killed_drain_had_counted_is_counted_once(place, monkeypatch):
    """It goes last: a program that waits for that reads the figures. Each run that the process was of has its own."""
    process = place.start(LATE, **LATE_ENV)
    for name in ("bind", "again"):
        (place.folder / name).touch()
    process.communicate(timeout=240)
    first, second = (Drain(Serving(place.rings, place.folder, linger=0.0)) for _ in range(2))
    with monkeypatch.context() as killed:
        killed.setattr(RingSource, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.run()
    second.run()

    told = [drain["summary"] for run in place.runs() for drain in read_summaries(run)]
    assert sorted((figures["processes"], figures["spans"]) for figures in told) == [(1, 22), (1, 38)]


def interrupted(source: RingSource) -> None:
    """End a drain as a kill does."""
    source.close()
    raise KeyboardInterrupt


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_run_has_is_counted_and_sent_once_where_its_process_says_again_who_it_is(place, killed):
    """As a program of MPI does when it makes torch's process group: its drain has written some spans by then."""
    process = place.start(LATE.replace("2.00", "1.00"), **LATE_ENV)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0), Taker())
    (place.folder / "bind").touch()
    servers.wait_until(lambda: drain.tick() or place.runs(), what="the run directory")
    assert (process.stdout.readline(), process.stdout.readline()) == ("ready\n", "bound\n")
    (place.folder / "again").touch()
    process.communicate(timeout=240)
    if killed:
        abandon(drain)
        drain = Drain(drain.serving, drain.outlet)
    drain.run()

    (run,) = place.runs()
    told = [(summary["summary"]["spans"], summary["summary"]["processes"]) for summary in read_summaries(run)]
    each_and_its_root = sorted([*range(30)] * 2)
    assert (sizes(run), told, sorted(drain.outlet.times)) == (list(range(30)), [(60, 1)], each_and_its_root)


OUTSIDE = """
    import otel_dltrace as d
    from otel_dltrace.model.identity import Bind
    from otel_dltrace.record.tracer import live
    d.start()
    for number in (1, 2, 3):
        live.tracer.recorder.bind(Bind("job", f"{number}.00", "demo"))
        with d.phase("work", size=number):
            pass
"""


def test_what_is_in_no_step_is_of_the_generation_of_its_time(place):
    """Also where the drain reads of several generations at once."""
    result = place.run(OUTSIDE, OTEL_DLTRACE_DRAIN="off")
    assert result.returncode == 0, result.stderr
    assert place.command("recover").returncode == 0
    found = {read_run(run)[0].process.bind.generation: sizes(run) for run in place.runs()}
    assert found == {"1.00": [1], "2.00": [2], "3.00": [3]}


DRIFTING = """
    import os, sys
    import otel_dltrace as d
    from otel_dltrace.record.tracer import live
    d.start()
    extra = 0
    live.tracer.steps.group_seq = lambda: 5 * live.tracer.recorder.step + 1 + extra
    for i in range(10):
        extra = int(sys.argv[1]) if i in (4, 5, 6) else 0
        with d.step(i):
            pass
"""


def test_a_process_that_is_new_to_a_run_is_not_looked_for_in_it(place, monkeypatch):
    """A rank that comes again would else have the drain read all that its run has on this host, while rings wait."""
    read: list[Path] = []
    monkeypatch.setattr(member, "read_table", read.append)
    env = {**LATE_ENV, "OTEL_DLTRACE_RUN": "one", "WORLD_SIZE": "1"}
    for _ in range(2):
        assert place.run(DRIFTING, "0", **env).returncode == 0
        Drain(Serving(place.rings, place.folder, linger=0.0)).run()

    assert read == []
    assert [len(batch) for run in place.runs() for batch in read_run(run)] == [10, 10]


@pytest.mark.parametrize(("apart", "drifted"), [(0, 0), (2, 3)])
def test_the_drain_counts_steps_that_its_ranks_number_differently(place, apart, drifted):
    """A finding in the summary; nothing is merged or left out for it."""
    env = {"WORLD_SIZE": "2", "OTEL_DLTRACE_RUN": "one", "OTEL_DLTRACE_DRAIN": "off"}
    for rank, extra in enumerate((0, apart)):
        result = place.run(DRIFTING, str(extra), RANK=str(rank), LOCAL_RANK=str(rank), **env)
        assert result.returncode == 0, result.stderr
    assert place.command("recover").returncode == 0

    (run,) = place.runs()
    (summary,) = read_summaries(run)
    assert summary["summary"].get("drifted_steps", 0) == drifted
    assert [len(batch) for batch in read_run(run)] == [10, 10]
    servers.wait_until(lambda: not list(place.rings.glob("*.ring")), what="the rings' end")
