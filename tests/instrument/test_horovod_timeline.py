"""Horovod's own timeline, read while it grows: phases below the operations of rank 0, and the user's file untouched."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.export.foreign import horovod_file, horovod_live
from otel_dltrace.export.foreign.horovod_live import Told
from otel_dltrace.formats.horovod_events import count_timelines, timelines_of
from otel_dltrace.formats.horovod_json import MARK, OVER, START, Event, Reader
from otel_dltrace.formats.horovod_tail import TailReader
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows
from otel_dltrace.model.time import Anchor
from otel_dltrace.record.names import Followed
from tests.support import horovod_job, servers
from tests.support.horovod_files import REAL, SMALL, timeline
from tests.support.horovod_job import GRADIENTS, by_rank, need
from tests.support.processes import Place

STEPS = 6


# -- the reader ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REAL, *SMALL])
@pytest.mark.parametrize("piece", [1, 97, 1 << 20])
def test_pieces_of_a_file_give_its_events(name: str, piece: int) -> None:
    """However a file is cut into pieces, what comes out is what a reader of all of it gives."""
    data = timeline(name)
    if piece == 1:
        data = data[:20_000]
    reader, events = TailReader(), []
    for at in range(0, len(data), piece):
        events += reader.feed(data[at : at + piece])
    events += reader.feed(b"", final=True)
    assert events == list(Reader(data))


# -- the places of its spans, on a file that is written step by step ------------------------------

ANCHOR = Anchor(1_000_000_000, 1_700_000_000_000_000_000, 100)
START_US = (ANCHOR.wall - 500_000_000) // 1000
"""Horovod began half a second before the file was named, at 500 ms of the monotonic clock."""
HEADER = (
    f'[\n{{"name": "process_name", "ph": "M", "pid": 0, "args": {{"start_time_since_epoch_in_micros":{START_US}}}}},\n'
)


class Job:
    """A timeline that grows, and the ring's rows beside it; times in us since Horovod began."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "timeline.json"
        self.text = ""
        self.pids: dict[str, int] = {}
        self.restart()

    def restart(self, before: np.ndarray | None = None) -> None:
        """Be a drain that has just begun, after one that wrote *before*."""
        written = self.told.names.descriptors.table if before is not None else ()
        rows = empty_rows() if before is None else before
        self.timelines = [Followed(str(self.path), ANCHOR)]
        self.told = Told(self.timelines, written, rows, ANCHOR.offset)

    def begin_another(self, path: Path) -> None:
        """Go on in a file of its own, as `hvd.stop_timeline` and `hvd.start_timeline` do."""
        self.path, self.text, self.pids = path, "", {}
        self.timelines.append(Followed(str(path), ANCHOR))

    def write(self, *events: tuple[str, int, str, str]) -> None:
        """Write events as Horovod does: each ends the array."""
        for phase, ts, tensor, name in events:
            self.text = self.text.removesuffix("]") + "," if self.text else HEADER
            if phase == MARK:
                self.text += f'{{"ph": "i", "name": "{name}", "ts": {ts}, "s": "g"}}]'
                continue
            if tensor not in self.pids:
                pid = self.pids[tensor] = len(self.pids) + 1
                self.text += (
                    f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{tensor}"}}}},\n'
                    f'{{"name": "process_sort_index", "ph": "M", "pid": {pid}, "args": {{"sort_index": {pid}}}}},\n'
                )
            named = "" if phase == OVER else f', "name": "{name}"'
            self.text += f'{{"ph": "{phase}"{named}, "ts": {ts}, "pid": {self.pids[tensor]}}}]'
        self.path.write_text(self.text)

    def allreduce(self, tensor: str, at: int) -> None:
        """Write a whole operation of 100 us."""
        self.write(
            ("B", at, tensor, "NEGOTIATE_ALLREDUCE"), ("E", at + 20, tensor, ""), ("B", at + 30, tensor, "ALLREDUCE")
        )
        self.write(("B", at + 40, tensor, "MPI_ALLREDUCE"), ("E", at + 90, tensor, ""), ("E", at + 100, tensor, ""))

    def know(
        self, tensor: str, start: int, end: int, step: int, number: int, seq: int, name: str = "allreduce"
    ) -> np.ndarray:
        """Have the ring hold an operation, or without a tensor the step; return its row."""
        described = Descriptor(s.COLLECTIVE, name, "0", backend=h.BACKEND, tensor=tensor)
        rows = empty_rows(1)
        rows["descriptor"] = self.told.names.number(described if tensor else Descriptor(s.STEP, s.RANK_STEP))
        values = {
            "start": 500_000_000 + start * 1000,
            "end": 500_000_000 + end * 1000,
            "step": step,
            "span_no": number,
            "seq": seq,
        }
        for column, value in values.items():
            rows[column] = value
        self.told.know(rows)
        return rows

    def rows(self, *, final: bool = False) -> list[tuple[str, int, int, int]]:
        """Return name, step, parent's number and start in us of the new rows."""
        rows, table = self.told.rows(final=final), self.told.names.descriptors
        self.last = rows
        starts = (rows["start"] - 500_000_000) // 1000
        names = [table[number].name for number in rows["descriptor"].tolist()]
        parents = [number if number < horovod_live.FIRST_NUMBER else -1 for number in rows["parent_no"].tolist()]
        return sorted(zip(names, rows["step"].tolist(), parents, starts.tolist(), strict=True), key=lambda r: r[3])


def phases(at: int, step: int, number: int) -> list[tuple[str, int, int, int]]:
    """Return the rows of `Job.allreduce`; an activity is below the bar, whose number is not told."""
    return [
        ("NEGOTIATE_ALLREDUCE", step, number, at),
        ("ALLREDUCE", step, number, at + 30),
        ("MPI_ALLREDUCE", step, -1, at + 40),
    ]


def started(rows: list[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """Return *rows* without the one that tells when Horovod began."""
    return [row for row in rows if row[0] != h.TIMELINE_START]


@pytest.mark.parametrize("is_read", [False, True])
def test_what_is_begun_again_before_it_was_read_is_told(is_read: bool, tmp_path: Path) -> None:
    """Horovod empties the file: nobody will know what it held."""
    job = Job(tmp_path)
    job.allreduce("w", 100)
    if is_read:
        job.rows()
    job.begin_another(job.path)
    job.allreduce("w", 300)
    job.rows()

    told = f"{job.path} was started anew before it had been read: what it held is missing here"
    assert job.told.notes == [told] * (not is_read)


@pytest.mark.parametrize(
    "ends", [pytest.param("", id="within"), pytest.param('{"ph": "E", "ts"', id="at its end, too")]
)
def test_records_that_cannot_be_read_are_told(ends: str, tmp_path: Path) -> None:
    """As of a file that is read at once; the others are there, also those of the file that follows in its place."""
    job = Job(tmp_path)
    job.know("w", 90, 210, 3, 7, 1)
    job.allreduce("w", 100)
    whole = '{"ph": "B", "name": "ALLREDUCE"'
    job.path.write_text(job.text.replace(whole, "{" + whole, 1) + ends)
    rows = started(job.rows(final=True))
    offline = Reader(job.path.read_bytes())

    assert [event.name for event in offline if event.phase == "B"] == [
        "NEGOTIATE_ALLREDUCE",
        "ALLREDUCE",
        "MPI_ALLREDUCE",
    ]
    assert rows == phases(100, 3, 7)
    at = job.text.index(whole)
    assert job.told.notes == [
        f"{job.path}: events that could not be read and are missing: {1 + bool(ends)}, the first at byte {at}"
    ]
    assert ends or job.told.notes[0].endswith(offline.notes[0])


def test_phases_wait_for_their_operation(tmp_path: Path) -> None:
    """Each is below the operation of its tensor in which it ended, whichever comes first, the file or the ring."""
    job = Job(tmp_path)
    job.allreduce("allreduce.w", 1000)
    assert started(job.rows()) == []
    job.know("allreduce.w", 990, 1200, 3, 7, 4)
    assert started(job.rows()) == phases(1000, 3, 7)
    job.know("allreduce.w", 2050, 2300, 4, 9, 5)  # ready after another rank
    job.know("allreduce.w", 4000, 4300, 5, 11, 6)
    job.allreduce("allreduce.w", 2000)
    assert started(job.rows()) == phases(2000, 4, 9)
    assert set(job.last["seq"].tolist()) == {5}
    job.allreduce("allreduce.w", 4010)
    assert started(job.rows()) == phases(4010, 5, 11)


def test_an_unnamed_tensor_is_known_by_its_number(tmp_path: Path) -> None:
    """Several may be under way; Horovod's number is the handle's."""
    job = Job(tmp_path)
    job.know("allreduce.noname.N", 990, 9000, 0, 7, 41)
    job.know("allreduce.noname.N", 995, 9000, 0, 8, 42)
    job.allreduce("allreduce.noname.42", 1000)
    job.allreduce("allreduce.noname.41", 1100)
    assert started(job.rows()) == [*phases(1000, 0, 8), *phases(1100, 0, 7)]
    assert {d.tensor for d in job.told.names.descriptors} == {"", "allreduce.noname.N"}


def test_what_is_in_no_operation_is_in_the_step_of_its_time(tmp_path: Path) -> None:
    """Marks of cycles, and what this rank did for others while it had joined."""
    job = Job(tmp_path)
    job.write((MARK, 900, "", "CYCLE_START"))
    job.allreduce("allreduce.theirs", 1000)
    job.write((MARK, 5000, "", "CYCLE_START"))
    assert started(job.rows()) == []
    job.know("", 800, 2000, 2, 3, 0)
    assert started(job.rows()) == [("CYCLE_START", 2, 0, 900)]
    assert job.rows(final=True) == [*phases(1000, 2, 0), ("CYCLE_START", NO_STEP, 0, 5000)]


def test_a_second_drain_tells_nothing_twice(tmp_path: Path) -> None:
    """It reads the file from its begin, and what the first one wrote stays as it is."""
    job = Job(tmp_path)
    job.allreduce("allreduce.w", 1000)
    first = job.know("allreduce.w", 990, 1200, 3, 7, 4)
    assert started(job.rows()) == phases(1000, 3, 7)
    job.restart(np.concatenate([first, job.last]))
    assert job.rows() == []
    job.allreduce("allreduce.w", 2000)
    job.know("allreduce.w", 1990, 2200, 4, 9, 5)
    assert job.rows() == phases(2000, 4, 9)


def test_a_file_of_a_later_run_is_none_of_ours(tmp_path: Path) -> None:
    """Horovod empties its file at each start: what another process wrote there afterwards is not this one's."""
    job = Job(tmp_path)
    job.allreduce("allreduce.w", 1000)
    job.path.write_text(job.text.replace(str(START_US), str(START_US + 60_000_000)))
    job.know("allreduce.w", 990, 1200, 3, 7, 4)
    assert job.rows(final=True) == []


def test_a_file_that_is_begun_anew_is_read_anew(tmp_path: Path) -> None:
    """As at a second `hvd.init`."""
    job = Job(tmp_path)
    job.allreduce("allreduce.w", 1000)
    job.know("allreduce.w", 990, 1200, 3, 7, 4)
    assert started(job.rows()) == phases(1000, 3, 7)
    job.text, job.pids = "", {}
    job.write((MARK, 10, "", "CYCLE_START"))
    job.path.write_text(job.text.replace(str(START_US), str(START_US + 1000)))
    assert started(job.rows(final=True)) == [("CYCLE_START", NO_STEP, 0, 1010)]


def test_a_file_that_is_cut_shorter_is_read_anew(tmp_path: Path) -> None:
    """Also where it begins as before: that of a run that began in the same moment, or one that somebody emptied."""
    job = Job(tmp_path)
    job.allreduce("allreduce.w", 1000)
    job.know("allreduce.w", 990, 1200, 3, 7, 4)
    assert started(job.rows()) == phases(1000, 3, 7)
    job.allreduce("allreduce.w", 2000)
    job.know("allreduce.w", 1990, 2200, 4, 9, 5)
    assert started(job.rows()) == phases(2000, 4, 9)
    job.text, job.pids = "", {}
    job.allreduce("allreduce.w", 1000)
    job.know("allreduce.w", 990, 1200, 5, 11, 6)
    assert started(job.rows(final=True)) == phases(1000, 5, 11)


@pytest.mark.parametrize(("since", "count"), [(0, 2), (501_000_000, 2), (501_500_000, 1)], ids=["all", "part", "one"])
def test_timelines_that_a_program_starts_one_after_the_other_stay_apart(tmp_path: Path, since: int, count: int) -> None:
    """Both count from `hvd.init`, and are exported as they were, wherever a part of the run begins."""
    job = Job(tmp_path)
    job.allreduce("allreduce.w", 1000)
    job.know("allreduce.w", 990, 1200, 0, 7, 1)
    parts = [job.told.rows(final=False)]
    first = list(Reader(job.path.read_bytes()))
    job.begin_another(tmp_path / "more.json")
    job.write((OVER, 2000, "allreduce.w", ""))
    job.allreduce("allreduce.w", 2100)
    job.know("allreduce.w", 2090, 2300, 1, 9, 2)
    parts.append(job.told.rows(final=True))
    second = list(Reader(job.path.read_bytes()))

    rows = np.concatenate(parts[::-1])  # whatever the order in which the run directory has them
    rows = rows[rows["start"] > since]
    batch = SpanBatch(rows, job.told.names.descriptors, Process(1, Bind("job", "1.00"), anchor=ANCHOR))
    if since:  # the first one's begin is cut off: what is left counts from its own first event
        first = [Event(START, START_US + 1030), *(event._replace(ts=event.ts - 1030) for event in first[3:])]
    assert [list(events) for events in timelines_of([batch])] == [first, second][-count:]
    assert count_timelines([batch]) == count


@pytest.mark.parametrize("is_final", [False, True], ids=["while it runs", "at its end"])
def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_final: bool) -> None:
    """So that rings are looked at in between; what the ring told meanwhile is not forgotten."""
    monkeypatch.setattr(horovod_file, "AT_ONCE", 1000)
    monkeypatch.setattr(horovod_live, "REMEMBERED_NS", 0)
    job, expected = Job(tmp_path), []
    for number in range(1, 21):
        at = 1000 * number
        job.allreduce("allreduce.w", at)
        job.know("allreduce.w", at - 10, at + 200, number, number, number)
        expected += phases(at, number, number)
    found, is_over = [], []
    for _ in range(20):
        found.append(started(job.rows(final=is_final)))
        is_over.append(job.told.is_over)
    pieces = [rows for rows in found if rows]
    assert (len(pieces) > 5, [row for rows in pieces for row in rows]) == (True, expected)
    assert is_over == [is_final and at >= len(pieces) - 1 for at in range(20)]


# -- real runs ----------------------------------------------------------------------------------


def told(batch: SpanBatch) -> SpanBatch:
    """Return what the timeline told."""
    return batch.take(batch["span_no"] >= horovod_live.FIRST_NUMBER)


def parents(batch: SpanBatch, part: SpanBatch) -> list[tuple[Descriptor, Descriptor | None]]:
    """Return the descriptor of each row of *part* and that of its parent."""
    of = {int(number): batch.descriptor_of(row) for row, number in enumerate(batch["span_id"].tolist())}
    return [(part.descriptor_of(row), of.get(number)) for row, number in enumerate(part["parent_id"].tolist())]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_the_users_timeline_is_below_the_operations(place: Place, horovod_site: Path, controller: str) -> None:
    """Every bar is below the operation of its tensor, or of that below; written again it is the user's file."""
    need(controller)
    variables = {"HOROVOD_TIMELINE": "timeline.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    horovod_job.run(place, horovod_site, controller, 2, str(STEPS), **variables)
    first, second = by_rank(place, 2)
    written = (place.folder / "timeline.json").read_bytes()
    events = list(Reader(written))
    ours = told(first)

    assert len(told(second)) == 0
    assert Counter(d.name for d, _ in parents(first, ours))["CYCLE_START"] == sum(e.phase == MARK for e in events)
    told_of = [(d, parent) for d, parent in parents(first, ours) if d.tensor and d.name != h.END]
    below = [(d, parent) for d, parent in told_of if parent is not None and parent.kind != s.STEP]
    # What join makes of the cache is in no operation; in a step, if it comes before that is over.
    assert {d.name for d, parent in told_of if (d, parent) not in below} <= {
        "NEGOTIATE_ALLREDUCE",
        "NEGOTIATE_ALLGATHER",
        "NEGOTIATE_ALLTOALL",
    }
    assert [(d, parent) for d, parent in below if parent.tensor != d.tensor] == []
    bars = [parent.kind for d, parent in below if d.name in h.OPERATIONS]
    assert set(bars) == {s.COLLECTIVE}
    assert len(bars) == sum(e.phase == "B" and e.name in h.OPERATIONS for e in events)
    gradients = ours.take(ours.lookup(lambda d: d.tensor == GRADIENTS[0] and d.name == "ALLREDUCE", bool))
    steps = sum(e.tensor == GRADIENTS[0] and e.name == "ALLREDUCE" for e in events)
    assert 0 < steps <= STEPS  # at its end Horovod throws away what it has not written yet
    assert (sorted(gradients["step"].tolist()), sorted(gradients["seq"].tolist())) == (
        [*range(steps)],
        [*range(1, steps + 1)],
    )

    done = place.command("export", str(place.runs()[0]), "--to", "horovod", "-o", "again.json")
    assert done.returncode == 0, done.stderr
    assert (place.folder / "again.json").read_bytes() == written

    done = place.command("export", str(place.runs()[0]), "--to", "chrome", "-o", "chrome.json")
    assert done.returncode == 0, done.stderr
    drawn = json.loads((place.folder / "chrome.json").read_text())["traceEvents"]
    (tid,) = {
        e["tid"] for e in drawn if e["name"] == "thread_name" and e["args"]["name"] == GRADIENTS[0] and e["pid"] == 1
    }
    slices = Counter(e["name"] for e in drawn if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, tid))
    assert (slices["allreduce"], slices["ALLREDUCE"], slices[s.WAIT]) == (STEPS, steps, 0)
    lanes = Counter((e["pid"], e["args"]["name"]) for e in drawn if e["name"] == "thread_name")
    assert [lanes[pid, tensor] for pid in (1, 2) for tensor in GRADIENTS] == [1] * 8


@pytest.mark.timeout(2400)
def test_the_timeline_of_a_killed_rank_is_there(place: Place, horovod_site: Path) -> None:
    """Every bar that Horovod had written when rank 0 was killed; those that were open are marked as cut off."""
    horovod_job.run(place, horovod_site, "gloo", 2, str(STEPS), "killed", "0", ends=False, HOROVOD_TIMELINE="t.json")
    ours = told(by_rank(place, 2)[0])
    events = list(Reader((place.folder / "t.json").read_bytes()))
    bars = ours.take(ours.lookup(lambda d: d.kind == s.PHASE, bool))
    assert len(bars) == sum(event.phase == "B" for event in events)
    assert int(bars["step"][bars["step"] != NO_STEP].max()) >= STEPS - 2


DYNAMIC = """
import sys, torch, horovod.torch as hvd, otel_dltrace

hvd.init()
for step in range(6):
    with otel_dltrace.step():
        if step == 2:
            hvd.start_timeline("some.json")
        hvd.allreduce(torch.ones(4), name="x")
        hvd.allreduce(torch.ones(4), name="y")
        if step == 3:
            hvd.stop_timeline()
            hvd.start_timeline("more.json")
hvd.stop_timeline()  # at its end Horovod throws away what it has not written yet
"""


def run_program(place: Place, site: Path, code: str, *options: str, **env: str) -> None:
    """Run *code* on two ranks over Gloo, traced."""
    command = [sys.executable, "-m", "otel_dltrace", "run", "--no-report", *options, "--"]
    command += [*horovod_job.launcher("gloo", 2), sys.executable, str(place.write(code))]
    done = place.finish(place.popen(command, **horovod_job.environment(site), **env), horovod_job.ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(2400)
def test_a_timeline_that_the_program_starts_is_followed(place: Place, horovod_site: Path, tmp_path: Path) -> None:
    """From `start_timeline` on, into each of its files, of which an export makes as many; those of the window go out.

    Steps before the third are never slow, whatever the machine does, so none outside the window goes out as one.
    """
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "HOROVOD_TIMELINE": "DYNAMIC"}
        run_program(place, horovod_site, DYNAMIC, "--steps", "3-5", **env)
        place.deliver(**env)
        batch, _ = by_rank(place, 2)
        ours = told(batch)
        bars = ours.take(ours.lookup(lambda d: d.name == "ALLREDUCE", bool))
        seen = Counter(zip(bars.lookup(lambda d: d.tensor, object).tolist(), bars["step"].tolist(), strict=True))
        assert seen == {(f"allreduce.{name}", step): 1 for name in "xy" for step in (2, 3, 4, 5)}
        in_window = ours.take((ours["step"] >= 3) & (ours["step"] <= 5))
        servers.wait_until(lambda: len(arrived(collector)) >= len(in_window), what="the phases of steps 3 to 5")
        assert arrived(collector) == {
            number.to_bytes(8, "big"): step
            for number, step in zip(in_window["span_id"].tolist(), in_window["step"].tolist(), strict=True)
        }
        done = place.command("export", str(place.runs()[0]), "--to", "horovod", "-o", "again")
        assert done.returncode == 0, done.stderr
        again = [(place.folder / "again" / name).read_bytes() for name in ("0.json", "1.json")]
        assert again == [(place.folder / name).read_bytes() for name in ("some.json", "more.json")]


def arrived(collector: servers.Collector) -> dict[bytes, int]:
    """Return the step of each phase of Horovod's that the collector has, by span id."""
    out = {}
    for span in collector.spans():
        said = servers.attributes(span)
        if said.get(s.DL_COMM_BACKEND) == h.BACKEND and s.DL_COMM_OPERATION not in said and s.DL_STEP in said:
            out[span.span_id] = said[s.DL_STEP]
    return out


@pytest.mark.timeout(2400)
def test_at_level_collective_the_timeline_is_left_alone(place: Place, horovod_site: Path) -> None:
    """Its file is the user's, and nothing of it is read."""
    run_program(place, horovod_site, DYNAMIC, "--level", "collective", HOROVOD_TIMELINE="DYNAMIC")
    batch, _ = by_rank(place, 2)
    assert len(told(batch)) == 0
    assert (place.folder / "some.json").exists()


AGAIN = """
import shutil
import torch
import horovod.torch as hvd
from otel_dltrace.instrument import horovod as adapter

adapter.CATCH_UP_S = 240.0  # a busy machine may keep the drain from reading for longer than a second

for name in ("x", "y"):
    hvd.init()
    rank = hvd.rank()
    for _ in range(40):
        hvd.allreduce(torch.ones(4), name=name)
    hvd.shutdown()
    if rank == 0:
        shutil.copy("t.json", f"{name}.json")
"""


@pytest.mark.timeout(2400)
def test_a_timeline_that_the_next_start_overwrites_was_read_before(place: Place, horovod_site: Path) -> None:
    """`hvd.shutdown` ends when the drain has all of the file, of which `hvd.init` makes the next generation's.

    Horovod may write the last bar of one into the other, or its end alone: it is cut off then, and still there.
    """
    waits_for_rank_0 = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}  # its shutdown lasts until the drain has read all
    run_program(place, horovod_site, AGAIN, HOROVOD_TIMELINE="t.json", **waits_for_rank_0)
    bars = Counter[str]()
    for batch in map(told, place.spans()):
        bars.update(batch.take(batch.lookup(lambda d: d.name == "ALLREDUCE", bool)).lookup(lambda d: d.tensor, object))
    written = [allreduces(place.folder / f"{name}.json") for name in "xy"]
    assert bars == written[0] + written[1]
    assert written[0]["allreduce.x"] > 0


def allreduces(timeline: Path) -> Counter[str]:
    """Return how many bars of an all-reduce *timeline* has, by tensor."""
    events = json.loads(timeline.read_text().rstrip("]\n, ") + "]")
    named = [event for event in events if event.get("name") == "process_name"]
    tensors = {event["pid"]: event["args"]["name"] for event in named if "name" in event["args"]}
    return Counter(tensors[event["pid"]] for event in events if event.get("name") == "ALLREDUCE")


GROWING = """
import sys, time
import otel_dltrace
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.tracer import live

otel_dltrace.instrument()
recorder = live.tracer.recorder
began, began_wall = time.monotonic_ns(), time.time_ns()
recorder.bind(Bind("job", "1.0123456789abcdef", "job"))
recorder.follow("timeline.json")
descriptor = recorder.intern(Descriptor("collective", "allreduce", "0", 1, "horovod", "allreduce.w"))
text = '[\\n{"name": "process_name", "ph": "M", "pid": 0, "args": '
text += f'{{"start_time_since_epoch_in_micros":{began_wall // 1000}}}}},\\n'
text += '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.w"}},\\n'
text += '{"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},\\n'


def write(event):
    global text
    ts = (time.monotonic_ns() - began) // 1000
    text = text.removesuffix("]") + ("," if text.endswith("]") else "") + event.replace("@", str(ts)) + "]"


for number in range(1, int(sys.argv[1]) + 1):
    with otel_dltrace.step():
        operation = Operation(recorder, descriptor, 8)
        write('{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": @, "pid": 1}')
        write('{"ph": "E", "ts": @, "pid": 1}')
        write('{"ph": "B", "name": "ALLREDUCE", "ts": @, "pid": 1}')
        write('{"ph": "E", "ts": @, "pid": 1}')
        time.sleep(0.001)
        operation.close(number)
    if number % 10 == 0:
        open("timeline.json", "w").write(text)
        otel_dltrace.flush()
        print(number, flush=True)
        sys.stdin.readline()
"""


def test_a_killed_drain_is_followed_by_one_that_goes_on(place: Place) -> None:
    """Every phase is there once, below its operation, whenever the drain is killed."""
    steps = 40
    command = [sys.executable, str(place.write(GROWING)), str(steps)]
    with subprocess.Popen(
        command,
        cwd=place.folder,
        env=place.env(OTEL_DLTRACE="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        for line in program.stdout:
            if int(line) == 20:
                killed = place.drains()
                for drain in killed:
                    drain.kill()
            program.stdin.write("\n")
            program.stdin.flush()
    assert (program.returncode, len(killed)) == (0, 1)
    place.wait_for_rings()
    (batch,) = place.spans()
    ours = told(batch)
    below = ours.take(ours.lookup(lambda d: d.kind == s.PHASE, bool))
    assert len(set(batch["span_id"].tolist())) == len(batch)
    assert Counter(zip(below.lookup(lambda d: d.name, object).tolist(), below["step"].tolist(), strict=True)) == {
        (name, step): 1 for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE") for step in range(steps)
    }
    assert {parent.tensor for _, parent in parents(batch, below)} == {"allreduce.w"}
