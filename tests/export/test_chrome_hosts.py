"""A Chrome trace of several hosts: whose clocks are seen to be off, its lanes are moved to where collectives meet."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.time import Anchor
from tests.support.runs import MS, Rank

STEPS = 5


def a_run(root: Path, ahead: int, job: str = "job") -> Path:
    """Write the run of two ranks, each on a host of its own; the second one's wall clock is *ahead* by so many ms."""
    for number in range(2):
        clock = Anchor(0, number * ahead * MS, 50)
        rank = Rank(number, 2, f"{job}-{number}", anchor=clock, nonce=len(job) << 8 | number)
        assert rank.process.bind is not None
        rank.process = replace(rank.process, bind=replace(rank.process.bind, job=job))
        for step in range(STEPS):
            rank.step(step, 10 * step, 10 * step + 9)
            rank.collective(step, 10 * step + 5, 10 * step + 6, step + 1, level=Level.COLLECTIVE)
        batch = rank.batch()
        writer = RunWriter(root, f"{job}-{number}")
        writer.open()
        writer.know(batch.process)
        writer.append(batch.process.nonce, batch.rows, batch.descriptors, batch.errors)
        writer.name_run(batch.process.bind)
        writer.close_segment()
        writer.close()
    return root


def lags(trace: Path) -> set[float]:
    """Return by how many ms the second rank's slices are behind the first one's."""
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    pids = sorted({one["pid"] for one in slices})
    begins = [sorted(one["ts"] for one in slices if one["pid"] == pid) for pid in pids]
    assert len(begins[0]) >= 2
    return {round((second - first) / 1000, 3) for first, second in zip(*begins, strict=True)}


@pytest.mark.parametrize("ahead", [3_000, -40])
@pytest.mark.parametrize(
    "command", [["export", "RUN", "--to", "chrome"], ["open", "RUN", "--step", "3", "--in", "perfetto"]], ids=" ".join
)
def test_lanes_of_hosts_whose_clocks_are_off_meet_at_the_ends_of_collectives(tmp_path, capsys, command, ahead):
    """And that is said: no other reader of these times sees them so."""
    run, trace = a_run(tmp_path / "run", ahead), tmp_path / "trace.json"

    assert main([str(run) if word == "RUN" else word for word in command] + ["-o", str(trace)]) == 0

    assert lags(trace) == {0.0}
    assert f"clocks are {abs(ahead):,.1f} ms apart" in capsys.readouterr().err
    processes = json.loads(trace.read_text())["otherData"]["processes"]
    assert [process["clock_uncertainty_ns"] for process in processes] == [100 + MS] * 2


def test_lanes_of_hosts_whose_clocks_may_be_right_stay(tmp_path, capsys):
    """Half a ms is within what a collective takes."""
    run, trace = a_run(tmp_path / "run", 0), tmp_path / "trace.json"

    assert main(["export", str(run), "--to", "chrome", "-o", str(trace)]) == 0

    assert lags(trace) == {0.0}
    assert "apart" not in capsys.readouterr().err


def test_each_run_is_put_on_a_time_line_of_its_own(tmp_path, capsys):
    """Hosts of different runs meet nowhere; those of a run whose clocks are right stay where they are."""
    runs = a_run(tmp_path / "off", 3_000), a_run(tmp_path / "right", 0, "another")
    trace = tmp_path / "trace.json"

    assert main(["export", *map(str, runs), "--to", "chrome", "-o", str(trace)]) == 0

    whole = json.loads(trace.read_text())
    begins = [event["ts"] for event in whole["traceEvents"] if event["ph"] == "X" and event["name"] == "rank.step"]
    assert {begins.count(begin) for begin in begins} == {4}
    assert "clocks are 3,000.0 ms apart" in capsys.readouterr().err
    unsure = sorted(process["clock_uncertainty_ns"] for process in whole["otherData"]["processes"])
    assert unsure == [50, 50, 100 + MS, 100 + MS]


@pytest.mark.parametrize(
    "command", [["export", "RUN", "--to", "chrome", "--steps", "3"], ["open", "RUN", "--step", "3", "--in", "perfetto"]]
)
def test_lanes_are_moved_with_the_ranks_that_are_not_asked_for(command, tmp_path):
    """One rank alone meets nobody, and is drawn where it is in the file of all."""
    run = a_run(tmp_path / "run", 3_000)
    begins = []
    for number, more in enumerate([[], ["--rank", "1"]]):
        trace = tmp_path / f"{number}.json"
        assert main([str(run) if word == "RUN" else word for word in command] + ["-o", str(trace), *more]) == 0
        whole = json.loads(trace.read_text())
        base = int(whole["otherData"]["base_unix_ns"])
        steps = [event for event in whole["traceEvents"] if event["ph"] == "X" and event["name"] == "rank.step"]
        begins.append({base + round(1000 * step["ts"]) for step in steps})

    assert begins[1] == begins[0]
