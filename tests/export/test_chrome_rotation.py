"""Chrome traces of a run in several files: each complete by itself, and together every span once."""

import gzip
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.chrome.notes import Note
from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch, fill_ids
from tests.support.chrome_batches import ANCHOR, sampled
from tests.support.chrome_rules import complaints
from tests.support.runs import Rank

STEPS, ROOM = 60, 20_000
PHASE = Descriptor(s.PHASE, "checkpoint")


def batch_of(rank: int, host: str, first: int = 0) -> SpanBatch:
    """Return steps of a rank, each with a stage, two collectives, one's wait, and a phase that is outside any step."""
    one = Rank(rank, 4, host, anchor=ANCHOR)
    for n in range(first, first + STEPS):
        at = 1000 + 10 * n + 0.1 * rank
        one.step(n, at, at + 9).stage(n, "forward", at, at + 4)
        one.collective(n, at + 4, at + 7, 2 * n)
        one.add(Descriptor(s.PHASE, s.WAIT), n, at + 5, at + 7, parent_no=len(one.rows))
        one.collective(n, at + 5, at + 8, 2 * n + 1)
        one.add(PHASE, NO_STEP, at + 9, at + 9.5)
    batch = one.batch()
    fill_ids(batch.rows, batch.descriptors, batch.process)
    return batch


def write_run(root: Path) -> list[SpanBatch]:
    """Write a run of two hosts with two ranks and two files each to *root*; return its spans."""
    every = []
    for number, host in enumerate(("node-0", "node-1")):
        writer = RunWriter(root, host)
        for first in (0, STEPS):
            for rank in (2 * number, 2 * number + 1):
                batch = batch_of(rank, host, first)
                # One process goes on: numbers, and so ids, do not begin anew.
                batch.rows["span_no"] += first * 6
                batch.rows["parent_no"] += np.where(batch.rows["parent_no"] > 0, first * 6, 0).astype(np.uint32)
                fill_ids(batch.rows, batch.descriptors, batch.process)
                writer.append(batch.process.nonce, batch.rows, batch.descriptors, batch.errors)
                writer.know(batch.process)
                every.append(batch)
            writer.close_segment()
        writer.name_run(every[0].process.bind)
        writer.close()
    return every


def trace_of(path: Path) -> dict[str, Any]:
    """Return the trace in *path*, which no viewer complains about."""
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    trace: dict[str, Any] = json.loads(text)
    assert complaints(trace["traceEvents"]) == []
    assert len(text) <= ROOM
    return trace


def spans_in(trace: dict[str, Any]) -> list[str]:
    return [e["args"]["span_id"] for e in trace["traceEvents"] if "span_id" in e.get("args", {})]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_each_file_of_a_run_is_complete(tmp_path, capsys, name):
    """No file is larger than asked, each names its lanes, joins its collectives, and together they hold every span."""
    batches = write_run(tmp_path / "run")
    out = tmp_path / "out" / name
    out.parent.mkdir()
    assert main(["export", str(tmp_path / "run"), "--to", "chrome", "--max-bytes", str(ROOM), "-o", str(out)]) == 0
    suffix = name.removeprefix("t")
    count = len(list(out.parent.iterdir()))
    paths = [out, *(out.with_name(f"t.{n}{suffix}") for n in range(1, count))]
    traces = [trace_of(path) for path in paths]
    assert count > 10
    assert f"t.{count - 1}{suffix} ({count} files)" in capsys.readouterr().out
    assert [trace["otherData"]["part"] for trace in traces] == list(range(count))
    assert len({trace["otherData"]["base_unix_ns"] for trace in traces}) == 1
    assert Counter(span for trace in traces for span in spans_in(trace)) == Counter(
        f"{span:016x}" for batch in batches for span in batch["span_id"].tolist()
    )
    # All ranks of a time are together: arrows between them are in (nearly) every file.
    assert sum(any(e["ph"] == "s" for e in trace["traceEvents"]) for trace in traces) > 0.8 * count


def test_what_lies_between_files_is_in_order(tmp_path):
    """The ranks of one host have their turns: each file begins where the one before it ends, give or take a turn."""
    write_run(tmp_path / "run")
    main(["export", str(tmp_path / "run"), "--to", "chrome", "--max-bytes", str(ROOM), "-o", str(tmp_path / "t.json")])
    begins = []
    for n in range(len(list(tmp_path.glob("t*.json")))):
        events = trace_of(tmp_path / (f"t.{n}.json" if n else "t.json"))["traceEvents"]
        begins.append(min(e["args"][s.DL_STEP] for e in events if s.DL_STEP in e.get("args", {})))
    assert begins == sorted(begins)


def test_counters_and_remarks_are_beside_the_spans_of_their_time(tmp_path):
    """Each file has the counters of its time, none is lost at either end, and each remark is there once."""
    batch = batch_of(0, "node-0")
    points = [(0.8 + 0.01 * n, m.PROCESS_MEMORY_USAGE, 100.0 + n, {}, 0) for n in range(82)]
    notes = [Note(batch.process.nonce, at * 10**6, (at + 1) * 10**6, f"remark {at}") for at in (1001, 1500)]
    names: list[Path] = []
    write_chrome(
        [batch], tmp_path / "t.json", metrics=[sampled(points)], notes=notes, max_bytes=ROOM, wrote=names.append
    )
    assert len(names) > 3
    values: set[int] = set()
    remarks = []
    for path in names:
        events = trace_of(path)["traceEvents"]
        shown = [e for e in events if e["ph"] == "C"]
        assert shown
        values |= {value for e in shown for value in e["args"].values()}
        remarks += [e["name"] for e in events if e.get("cat") == "note"]
    assert values == {100 + n for n in range(82)}
    assert remarks == ["remark 1001", "remark 1500"]


def test_there_is_room_for_the_remarks(tmp_path):
    """A slow stage in every step, in many words: no file is larger than asked for them."""
    batch = batch_of(0, "node-0")
    starts = [(1000 + 10 * step) * 10**6 for step in range(STEPS)]
    notes = [Note(batch.process.nonce, at, at + 10**6, "slow " * 40, {"at": at}) for at in starts]
    names: list[Path] = []
    write_chrome([batch], tmp_path / "t.json", notes=notes, max_bytes=ROOM, wrote=names.append)

    remarks = [e["args"]["at"] for path in names for e in trace_of(path)["traceEvents"] if e.get("cat") == "note"]
    assert sorted(remarks) == starts


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.export.test_chrome_rotation import ROOM, batch_of
from otel_dltrace.export.chrome.writer import write_chrome
def batches():
    yield batch_of(0, "node-0")
    os.kill(os.getpid(), signal.SIGKILL)
write_chrome(batches(), Path(sys.argv[1]), max_bytes=ROOM)
"""


def test_the_files_of_a_killed_export_are_whole(tmp_path):
    """After SIGKILL each file that has its name is a trace; what was not finished has none."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "t.json")]
    assert subprocess.run(command, check=False, timeout=240).returncode == -signal.SIGKILL
    there = sorted(tmp_path.glob("t*.json"))
    assert len(there) > 3
    assert all(spans_in(trace_of(path)) for path in there)


def test_a_shorter_export_tells_of_files_that_are_older(tmp_path, capsys, monkeypatch):
    """Who exports again to fewer files learns which are not of these; what has another name is somebody else's."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    export = ["export", str(tmp_path / "run"), "--to", "chrome", "-o", str(tmp_path / "t.json"), "--max-bytes"]
    assert (main([*export, str(ROOM)]), capsys.readouterr().err) == (0, "")
    count = len(list(tmp_path.glob("t*.json")))
    assert count > 11
    (tmp_path / "t.2026.json").write_text("{}")
    assert main([*export, "10M"]) == 0
    told = f"t.1.json to t.{count - 1}.json ({count - 1} files) are from an earlier export, and not part of this one\n"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ["chrome", "--max-bytes", "much"], "'much' is not a whole number; write 268435456", id="no number"
        ),
        pytest.param(["chrome", "--max-bytes", "256"], "256 is too small for a file; write at least 16K", id="no M"),
        pytest.param(["otlp", "--max-bytes", "1M"], "--max-bytes is for --to chrome", id="another format"),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(tmp_path, capsys, arguments, said):
    """A size that is none, a format with one file: exit code 2 and what to write."""
    write_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "t"), "--to", *arguments]) == 2
    assert said in capsys.readouterr().err
