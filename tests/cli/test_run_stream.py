"""Runs that are exported as they are read: what is held does not grow with their length."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.spans import Process, empty_rows, fill_ids

FILE_ROWS = 60_000
PER_STEP = 100
EXPORT = """
import resource, sys
from otel_dltrace.cli.main import main
code = main(["export", sys.argv[1], "-o", sys.argv[2], *sys.argv[3:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""
DESCRIPTORS = [RANK_STEP, Descriptor(s.PHASE, "ALLREDUCE", backend="horovod", tensor="w", activity="ALLREDUCE")]


def rows_of(number: int) -> Column:
    """Return the rows of file *number*: steps of `PER_STEP` spans, the first of which is the step."""
    rows = empty_rows(FILE_ROWS)
    at = np.arange(FILE_ROWS) + number * FILE_ROWS
    rows["span_no"], rows["step"] = 1 + at, at // PER_STEP
    is_step = at % PER_STEP == 0
    rows["descriptor"] = ~is_step
    rows["level"] = np.where(is_step, s.Level.STEP, s.Level.PARTITION)
    rows["start"] = at * 1000
    rows["end"] = rows["start"] + np.where(is_step, PER_STEP * 1000, 900)
    return rows


def write_run(root: Path, files: int) -> Path:
    """Write a run of one rank in so many *files*; return it."""
    process = Process(7, Bind("job", "1.ab", "job"), "host", "ab" * 16)
    writer = RunWriter(root, "host-abababab")
    for number in range(files):
        rows = rows_of(number)
        fill_ids(rows, DESCRIPTORS, process)
        writer.append(process.nonce, rows, DESCRIPTORS, [("", "")])
        writer.close_segment()
    writer.name_run(process.bind)
    writer.know(process)
    writer.close()
    return root


def export(run: Path, out: Path, *arguments: str) -> tuple[int, str, int]:
    """Export *run*; return the exit code, what was said, and the largest memory in KiB."""
    command = [sys.executable, "-c", EXPORT, str(run), str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    *said, peak = done.stderr.splitlines()
    return done.returncode, "\n".join(said), int(peak)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """Runs by how many files they have."""
    folder = tmp_path_factory.mktemp("runs")
    return {files: write_run(folder / f"run-{files}", files) for files in (2, 7)}


@pytest.mark.parametrize("form", ["chrome", "horovod"])
def test_many_spans_take_no_more_memory_than_a_few(runs, tmp_path, form):
    """Two files of 60,000 spans, and seven: the trace holds them all, the process does not."""
    (code, _, small), (other, said, large) = (
        export(runs[files], tmp_path / f"{files}.json.gz", "--to", form) for files in (2, 7)
    )
    assert (code, other, said) == (0, 0, "")
    assert large - small < 20 << 10, f"{small} KiB for 120,000 spans, {large} KiB for 420,000"


def test_what_is_streamed_is_what_is_there(runs, tmp_path):
    """Steps on both sides of a border between files come whole, each span once."""
    last = FILE_ROWS // PER_STEP
    code, said, _ = export(
        runs[2], tmp_path / "part.json", "--to", "chrome", "--steps", f"{last - 1}-{last}", "--rank", "0"
    )
    events = json.loads((tmp_path / "part.json").read_text())["traceEvents"]
    drawn = [event["args"]["span_id"] for event in events if event["ph"] == "X" and "span_id" in event["args"]]
    [batch] = read_run(runs[2])
    there = batch["span_id"][np.isin(batch["step"], [last - 1, last])]
    assert (code, said) == (0, "")
    assert sorted(drawn) == sorted(f"{span:016x}" for span in there.tolist())


@pytest.mark.parametrize(("arguments", "said"), [(("--rank", "3"), "rank 3 is not"), (("--steps", "9000"), "none of")])
def test_what_is_not_there_is_said(runs, tmp_path, arguments, said):
    """A sentence, exit code 2, and no file."""
    code, told, _ = export(runs[2], tmp_path / "none.json", "--to", "chrome", *arguments)
    assert (code, said in told, list(tmp_path.iterdir())) == (2, True, [])
