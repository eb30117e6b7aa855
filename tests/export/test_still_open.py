"""What a process that lives has had open for long: in a file of its own, as long as it is."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from otel_dltrace.export import drain as drain_module
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.rundir.reader import read_batches, read_run
from otel_dltrace.export.rundir.span_files import OPEN
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.semconv import Flag
from tests.support.processes import Place, abandon

ALONE = {"OTEL_DLTRACE": "1", "RANK": "0", "WORLD_SIZE": "1", "OTEL_DLTRACE_DRAIN": "off"}
IN_A_STEP = """
    import sys
    import otel_dltrace as d
    d.start()
    for _ in range(3):
        with d.step():
            with d.operation("exchange", size=8):
                print("in it", flush=True)
                further = int(sys.stdin.readline() or 0)
        for _ in range(further):
            with d.step():
                pass
    print("over", flush=True)
    sys.stdin.readline()
"""
STANDS = int(Flag.TRUNCATED | Flag.OPEN)


@dataclass
class Standing:
    """A program that stands in its operation until it is told to go on, and a drain whose clock can be moved."""

    place: Place
    program: subprocess.Popen
    drain: Drain
    later: float = 0.0

    def wait(self) -> str:
        """Return where the program says it is."""
        return self.program.stdout.readline().strip()

    def go_on(self, further: int = 0) -> str:
        """Have the program go on, through so many *further* steps, and return where it says it is."""
        self.program.stdin.write(f"{further}\n")
        self.program.stdin.flush()
        return self.wait()

    def tick(self, seconds: float = 0.0) -> None:
        """Let the drain turn so much later."""
        self.later += seconds
        self.drain.tick()

    def spans(self, read=read_run) -> list[tuple[str, int, int]]:
        """Return name, step and flags of each span behind the first step."""
        runs = self.place.folder.glob("dltrace-*")
        rows = [(b.descriptor_of(i).name, b.rows[i]) for run in runs for b in read(run) for i in range(len(b))]
        return sorted((name, int(row["step"]), int(row["flags"])) for name, row in rows if row["step"] > 0)

    def files(self) -> list[Path]:
        """Return the files of what is open."""
        return list(self.place.folder.glob(f"dltrace-*/hosts/*/{OPEN}"))


@pytest.fixture
def standing(place, monkeypatch) -> Iterator[Standing]:
    """Give a program that stands in its second step: from there on it is known whose it is."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(place.write(IN_A_STEP))]
    program = subprocess.Popen(command, cwd=place.folder, env=place.env(**ALONE), stdin=pipe, stdout=pipe, text=True)
    one = Standing(place, program, Drain(Serving(place.rings, place.folder, linger=0.0, delay=0.0)))
    now = lambda: time.monotonic() + one.later  # noqa: E731
    clock = SimpleNamespace(monotonic=now, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
    monkeypatch.setattr(drain_module, "time", clock)
    assert [one.wait(), one.go_on()] == ["in it", "in it"]
    yield one
    program.communicate()
    while one.drain.followers:
        one.drain.tick()
    one.drain.finish()


def test_what_has_been_open_for_long_is_read_as_cut_off_and_is_in_no_other_file(standing):
    """The report and its like know it; who passes spans on, and would have to take it back, does not."""
    standing.tick()
    assert not standing.files()

    standing.tick(11.0)
    assert standing.spans() == [("exchange", 1, STANDS), ("rank.step", 1, STANDS)]
    assert standing.spans(read_batches) == []


def test_what_ends_after_all_is_there_once_and_as_it_was(standing):
    """Also where the drain was killed in between, or the file is older than what it says."""
    standing.tick()
    standing.tick(11.0)
    ((path, before),) = ((path, path.read_bytes()) for path in standing.files())
    assert standing.go_on() == "in it"
    abandon(standing.drain)
    standing.drain, standing.later = Drain(standing.drain.serving), 0.0  # or the next step would stand there too
    standing.tick()
    assert not standing.files()
    assert standing.spans() == (over := [("exchange", 1, 0), ("rank.step", 1, 0)])

    path.write_bytes(before)
    assert standing.spans() == over


def test_who_is_killed_leaves_no_file(standing):
    """What was open is among its spans then."""
    standing.tick()
    standing.tick(11.0)
    standing.program.kill()
    standing.program.wait()
    standing.tick()
    assert not standing.files()
    cut = int(Flag.TRUNCATED)
    assert standing.spans() == [("exchange", 1, cut), ("rank.step", 1, cut)]


def test_nobody_stands_in_a_step_whose_end_was_overwritten(standing):
    """The process has gone past it: the step was cut off, and nothing in it is known to be open."""
    standing.tick()
    assert standing.go_on(further=40_000) == "in it"
    standing.tick()
    standing.tick(11.0)
    assert standing.drain.followers
    assert [one for one in standing.spans() if one[1] == 1] == [("rank.step", 1, int(Flag.TRUNCATED))]
    assert [one for one in standing.spans() if one[2] & Flag.OPEN] == [
        ("exchange", 40_002, STANDS),
        ("rank.step", 40_002, STANDS),
    ]


def test_what_no_drain_writes_any_more_was_cut_off(standing):
    """It is gone with its host: what it saw last is all that is known, and nobody can say that it lasts."""
    standing.tick()
    standing.tick(11.0)
    for path in standing.files():
        os.utime(path, (time.time() - 121, time.time() - 121))
        # As if it were gone: this process would lose its lock by closing any descriptor of it.
        (path.parent / ".lock").replace(path.parent / ".not-the-lock")
    cut = int(Flag.TRUNCATED)
    assert standing.spans() == [("exchange", 1, cut), ("rank.step", 1, cut)]


def test_what_a_drain_of_this_host_writes_stands_whatever_the_time(standing):
    """A file server's clock says when it was written, or ours has been set: the drain's lock tells that it lives."""
    standing.tick()
    standing.tick(11.0)
    for path in standing.files():
        os.utime(path, (time.time() - 300, time.time() - 300))
    assert standing.spans() == [("exchange", 1, STANDS), ("rank.step", 1, STANDS)]
