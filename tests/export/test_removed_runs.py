"""Somebody tidies up: run directories are removed while their drain is at work, for them or for another job."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.export.rundir.host_folder import HostFolder
from otel_dltrace.export.rundir.reader import read_run
from tests.support import servers
from tests.support.processes import Place

HALVES = """
    import otel_dltrace as d, sys
    d.start()
    for half in range(2):
        for i in range(10):
            with d.step(10 * half + i), d.phase("rollout"):
                pass
        print(half, flush=True)
        sys.stdin.readline()
"""
ON = {
    "OTEL_DLTRACE": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "OTEL_DLTRACE_METRICS": "0",
    "OTEL_DLTRACE_STEPS": "all",
    "OTEL_BSP_SCHEDULE_DELAY": "50",
}
QUIET = {"processes": 1, "truncated": 0, "late": 0, "not_in_otlp": 0, "unrecorded": 0}


class Job:
    """A program that writes 20 spans, waits for `go_on`, writes 20 more, and waits again."""

    def __init__(self, place: Place, name: str, **env: str) -> None:
        self.place, self.name = place, name
        program = [sys.executable, str(place.write(HALVES, f"{name}.py"))]
        pipe, before = subprocess.PIPE, set(place.rings.glob("*.ring"))
        env = place.env(**ON, **env)
        self.process = subprocess.Popen(program, cwd=place.folder, env=env, stdin=pipe, stdout=pipe, text=True)
        place.children.append(self.process)
        self.wait_for(20, self.process.stdout.readline)
        (self.ring,) = set(place.rings.glob("*.ring")) - before

    @property
    def run(self) -> Path:
        """Return its run directory."""
        (run,) = self.place.folder.glob(f"dltrace-{self.name}-*")
        return run

    def spans(self) -> int:
        """Return how many of its spans can be read."""
        runs = self.place.folder.glob(f"dltrace-{self.name}-*")
        return sum(len(batch) for run in runs if (run / "hosts").is_dir() for batch in read_run(run))

    def wait_for(self, spans: int, said: Any) -> None:
        """Wait until the program has *said* something, and its drain has written *spans*."""
        said()
        servers.wait_until(lambda: self.spans() >= spans, what=f"{spans} spans of {self.name}")

    def go_on(self) -> None:
        """Have it write its second half."""
        print(file=self.process.stdin, flush=True)
        self.process.stdout.readline()

    def end(self) -> None:
        """Have it end; its drain has then read all of it."""
        self.process.communicate("\n", timeout=240)
        servers.wait_until(lambda: not self.ring.exists(), what=f"the end of {self.name}'s ring")

    def summary(self) -> dict[str, Any]:
        """Return its figures, as its drain has written them down."""
        (path,) = self.run.glob("hosts/*/drain.json")
        return json.loads(path.read_text())["summary"]


def remove(run: Path) -> None:
    """Remove a run directory, under another name: its drain makes files in it by their names, also meanwhile."""
    shutil.rmtree(run.rename(run.with_name("gone")))


def end_drains(place: Place) -> list[int]:
    """Have the drains end without lingering; return which there were."""
    drains = place.drains()
    for drain in drains:
        drain.terminate()
    place.wait_for_drains()
    return [drain.pid for drain in drains]


@pytest.mark.parametrize("begin", [["removed", "other"], ["other", "removed"]], ids=" ".join)
def test_a_run_directory_that_is_removed_is_nothing_to_the_other_job(place, begin):
    """One drain serves both, and goes on. What comes of the first is in a directory made anew, what went is counted."""
    jobs = {name: Job(place, name) for name in begin}
    drains = [drain.pid for drain in place.drains()]
    remove(jobs["removed"].run)
    for job in jobs.values():
        job.go_on()
    for job in jobs.values():
        job.end()
    still = end_drains(place)

    assert len(drains) == 1
    assert still == drains
    assert {name: (job.summary(), job.spans()) for name, job in jobs.items()} == {
        "removed": ({**QUIET, "spans": 40, "removed": 20}, 20),
        "other": ({**QUIET, "spans": 40}, 40),
    }
    assert [path.suffix for path in jobs["other"].run.glob("hosts/*/s*")] == [".parquet"]


def test_a_run_directory_that_is_removed_at_the_end_leaves_its_figures(place):
    """Nothing comes any more, so there is nothing to read, and the drain's figures say why."""
    job = Job(place, "removed")
    remove(job.run)
    job.process.kill()
    place.wait_for_rings()
    end_drains(place)

    assert job.summary() == {**QUIET, "spans": 20, "removed": 20}


def test_a_run_directory_that_is_removed_after_its_end_stays_away(place):
    """The drain lingers for another job, whose directory is finished as ever."""
    other, removed = (Job(place, name) for name in ("other", "removed"))
    for job in (other, removed):
        job.go_on()
    removed.end()
    remove(removed.run)
    other.end()
    end_drains(place)

    (ended,) = place.folder.glob("dltrace-*/hosts/*/drain.json")
    assert json.loads(ended.read_text())["ended"]
    assert other.summary() == {**QUIET, "spans": 40}
    assert [path.suffix for path in other.run.glob("hosts/*/s*")] == [".parquet"]


TIDIED = """
    import otel_dltrace as d, os, shutil
    d.start()
    with d.step():
        pass
    shutil.rmtree(os.environ["OTEL_DLTRACE_RING_DIR"])  # before its drain is up
"""


def test_rings_that_are_removed_unread_are_not_said_to_be_in_a_run(place):
    """As a system does that clears /dev/shm at a logout; no command is named that finds nothing there."""
    said = place.run(TIDIED, **ON).stderr
    place.rings.mkdir(exist_ok=True)  # the next test, or drain, finds it as it was

    assert said.startswith("otel_dltrace: nothing is in dltrace-"), said
    assert said.endswith(f": it has been removed, or the rings in {place.rings} were removed unread\n"), said
    assert place.runs() == []


SWEPT = """
    import otel_dltrace as d, pathlib, time
    d.start()
    for _ in range(2):
        with d.step():
            pass
    d.flush()
    while not pathlib.Path("swept").exists():
        time.sleep(0.01)
    time.sleep(1.2)  # a drain is looked for once a second
    for _ in range(100):
        with d.step():
            pass
"""


@pytest.mark.parametrize("kills", [False, True], ids=["the drain lives", "the drain too"])
def test_a_ring_that_is_removed_is_told_by_its_name(place, kills):
    """The drain that has it open reads it to the end; none is started that would find nothing."""
    program = place.start(SWEPT, **ON)
    servers.wait_until(lambda: sum(map(len, place.spans())) == 2, what="the first steps")
    (ring,) = place.rings.glob("*.ring")
    if kills:
        for drain in place.drains():
            drain.kill()
            drain.wait()
    shutil.rmtree(place.rings)
    (place.folder / "swept").touch()
    told = place.finish(program).stderr.splitlines()
    place.rings.mkdir(exist_ok=True)

    lost = f"somebody has removed {ring}: what the drain that reads it has not read is lost"
    count = f"so far 2 spans recorded; {lost}" if kills else "102 spans recorded, none lost"
    assert [line.partition("; in ")[0] for line in told] == [f"otel_dltrace: {lost}", f"otel_dltrace: {count}"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_looked_at_is_not_gone(tmp_path, monkeypatch, number):
    """Else its spans would count as removed."""
    folder = HostFolder(tmp_path / "node-0")
    folder.take()

    def fail(path: Path) -> os.stat_result:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", fail)
        assert not folder.is_gone
    (tmp_path / "node-0" / ".lock").unlink()

    assert folder.is_gone
    folder.leave()
