"""Delays planted in a real run: the report names each with rank, stage and what the machine did, and its length."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.chrome_rules import complaints
from tests.support.paths import PROGRAMS
from tests.support.processes import Place, a_place

pytest.importorskip("torch")

PROGRAM = (PROGRAMS / "planted.py").read_text()
STEPS, BATCH = 12, 4
PLANTED = {("dataloader_next", 0), ("checkpoint", 0), ("forward", 1)}
"""Stage and rank."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Give the folder in which the program has run, traced and with metrics."""
    with a_place(tmp_path_factory.mktemp("planted")) as it:
        env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_METRICS": "1"}
        result = it.torchrun(PROGRAM, str(it.folder), **env)
        assert result.returncode == 0, result.stderr
        it.wait_for_rings()
        for drain in it.drains():
            drain.wait(240)
        yield it


def run_of(place: Place) -> str:
    """Return the program's run."""
    return str(next(run for run in place.runs() if "program" in run.name))


@pytest.fixture(scope="module")
def report(place) -> dict[str, Any]:
    """Return the report as a program reads it."""
    result = place.command("report", run_of(place), "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def noted(place: Place, rank: int, stage: str, warm_up: int) -> list[float]:
    """Return the s that the program itself measured, after the warm-up."""
    measured: list[float] = json.loads((place.folder / f"planted.{rank}.json").read_text())[stage]
    return measured if stage.endswith("checkpoint") else measured[warm_up:]


def test_each_planted_delay_is_found_with_its_length(place, report):
    """No shorter than the program measured it, nor longer than the call that it is in; little is in no stage."""
    rows = {(part["name"], t["rank"]): t for part in report["timings"]["stages"] for t in part["ranks"]}
    for stage, rank in PLANTED:
        warm_up = report["timings"]["warm_up"]
        inside, around = (noted(place, rank, which, warm_up) for which in (stage, f"around {stage}"))
        row = rows[stage, rank]
        assert row["steps"] == len(inside)
        assert sum(inside) <= row["total"] / 1e9 <= sum(around)
    assert all(rows["residual", rank]["share"] <= 0.05 for rank in (0, 1))
    slowest = {part["name"]: part["slowest"] for part in report["timings"]["stages"] if part["stands_out"]}
    assert set(slowest.items()) >= PLANTED


def test_each_slow_stage_is_told_with_what_the_machine_did(place, report):
    """The stages that were planted are the slow ones; the CPUs were busy in one, the disk written in another."""
    found = {(one["slow"]["stage"], one["slow"]["rank"]): one for one in report["saturation"]["stages"]}
    assert set(found) >= PLANTED
    assert found["checkpoint", 0]["slow"]["steps"] == [7]
    signs = {where: {sign["kind"] for sign in one["signs"]} for where, one in found.items()}
    assert "cpu" in signs["forward", 1]
    assert not signs["dataloader_next", 0] & {"disk write", "gc"}
    if on_a_disk(place.folder):
        assert signs["checkpoint", 0] & {"disk", "disk write"}


def on_a_disk(folder: Path) -> bool:
    """Return whether what is written to *folder* goes to a disk that the kernel tells of."""
    return folder.stat().st_dev in {Path(disk.mountpoint).stat().st_dev for disk in psutil.disk_partitions()}


def test_the_report_for_people_names_them_in_words(place):
    """Rank, stage, and what happened meanwhile, as sentences; and the tables are there."""
    result = place.command("report", run_of(place), COLUMNS="1000")
    assert result.returncode == 0, result.stderr
    told = result.stdout.split("Slow stages, and what the machine did meanwhile")[1]
    lines = [line for line in told.splitlines() if line.startswith("Rank ")]
    (forward,) = [line for line in lines if line.startswith("Rank 1's forward took ")]
    assert ", while the CPUs of " in forward
    assert any(line.startswith("Rank 0's dataloader_next took ") for line in lines)
    (checkpoint,) = [line for line in lines if line.startswith("Rank 0's checkpoint took ")]
    assert "(in step 7)" in checkpoint
    for title in ("Timings from step ", "What was used", "samples/s"):
        assert title in result.stdout


def test_throughput_is_what_was_trained_on(report):
    """Every batch of every rank, and its samples."""
    ranks, steps = report["throughput"]["ranks"], STEPS - report["throughput"]["warm_up"]
    assert [(r["rank"], r["steps"], r["batches"], r["samples"]) for r in ranks] == [
        (rank, steps, steps, steps * BATCH) for rank in (0, 1)
    ]
    assert report["throughput"]["overall"]["samples_per_second"] == pytest.approx(
        sum(r["rates"]["samples_per_second"] for r in ranks)
    )


def test_the_chrome_trace_has_counters_and_remarks(place):
    """Tracks of the host and of each rank, at the time of its spans, and the slow stages below each rank."""
    path = place.folder / "trace.json"
    result = place.command("export", run_of(place), "--to", "chrome", "-o", str(path))
    assert result.returncode == 0, result.stderr
    events = json.loads(path.read_bytes())["traceEvents"]
    assert complaints(events) == []
    names = {e["pid"]: e["args"]["name"].split(" (")[0].split()[0] for e in events if e["name"] == "process_name"}
    tracks = {(names[e["pid"]], e["name"]) for e in events if e["ph"] == "C"}
    assert {("host", "CPU busy"), ("host", "memory used"), ("rank", "resident memory")} <= tracks
    steps = [e for e in events if e["ph"] == "X" and e["name"] == "rank.step"]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    inside = [e for e in events if e["ph"] == "C" and e["name"] == "CPU busy" and begin <= e["ts"] <= end]
    assert len(inside) > (end - begin) / 4e6  # a sample at least every 4 s, on the spans' clock
    remarks = {(e["name"], e["pid"] - 1) for e in events if e.get("cat") == "note"}
    assert {(f"slow {stage}", rank) for stage, rank in PLANTED} <= remarks
