"""A damaged run directory: what can be read is reported, and what cannot is said."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, copytree
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.metrics.segments import MetricSegments
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.compaction import compact, keep_within
from otel_dltrace.export.rundir.damage import damage_of
from otel_dltrace.export.rundir.host_folder import host_folder_name
from otel_dltrace.export.rundir.metric_reader import read_metrics
from otel_dltrace.export.rundir.reader import read_descriptors, read_run, read_summaries
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.metric_batch import NO_STEP, Point, batch_of
from otel_dltrace.model.metrics import SYSTEM_CPU_TIME, attributes_of
from otel_dltrace.model.operation import OTHER
from otel_dltrace.model.spans import SpanBatch
from tests.support.processes import nobody
from tests.support.run_files import a_run, write
from tests.support.runs import ddp

HOSTS = ("hosts/a-boot", "hosts/b-boot")
SEGMENT, PARQUET, NAMES = "spans-00001.arrows", "steps-*.parquet", "descriptors.arrows"


def garble(path: Path) -> None:
    """Overwrite a file with what it never was."""
    path.write_bytes(b"\x07" * path.stat().st_size)


def cut(path: Path) -> None:
    """Leave three quarters of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])


@pytest.mark.parametrize("harm", [garble, cut])
@pytest.mark.parametrize(("compacted", "name"), [(False, SEGMENT), (True, PARQUET)], ids=["segments", "compacted"])
def test_a_run_of_which_nothing_can_be_read_says_so(tmp_path, capsys, harm, compacted, name):
    """Not that nothing is in there yet."""
    run = a_run(tmp_path / "run", compacted=compacted)
    files = [path for host in HOSTS for path in (run / host).glob(name)]
    for path in files:
        harm(path)

    assert main(["report", str(run)]) == 2
    told = "; ".join(f"{path.relative_to(run)} is damaged" for path in files)
    assert capsys.readouterr().err == f"otel-dltrace: {run}: no span can be read: {told}\n"


@pytest.mark.parametrize(
    ("name", "harm", "told"),
    [
        pytest.param(SEGMENT, garble, f"{HOSTS[1]}/{SEGMENT} is damaged", id="spans"),
        pytest.param(NAMES, garble, f"{HOSTS[1]}/{NAMES} is damaged: some spans have no names", id="names"),
        pytest.param(NAMES, Path.unlink, f"{HOSTS[1]}/{NAMES} is missing: some spans have no names", id="no names"),
        pytest.param(
            "drain.json", cut, f"{HOSTS[1]}/drain.json is damaged: whose spans these are is not known", id="summary"
        ),
    ],
)
def test_a_report_rests_on_what_can_be_read(tmp_path, capsys, name, harm, told):
    """One host's file is damaged: the report is about the rest, and its last line says so."""
    run = a_run(tmp_path / "run", compacted=False)
    harm(run / HOSTS[1] / name)

    assert main(["report", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"; without what cannot be read: {told}. All times" in said
    assert "; none known to be lost; " in said


@pytest.mark.parametrize("compacted", [False, True], ids=["segments", "compacted"])
@pytest.mark.parametrize("named", ["a-boot-copy", "a-boot-2", "A copy of a-boot"])
def test_a_copy_of_a_hosts_folder_is_not_read_again(tmp_path, capsys, named, compacted):
    """All of its spans would count twice; a drain's second folder of a host has others."""
    run = a_run(tmp_path / "run", compacted=compacted)
    before = [len(batch) for batch in read_run(run)]
    copytree(run / HOSTS[0], run / "hosts" / named)
    told = f"hosts/{named} is a copy of a-boot, and is not read again"

    assert [len(batch) for batch in read_run(run)] == before
    assert said_of(run, capsys) == ("0-1 of 2", told)
    assert [summary["summary"]["spans"] for summary in read_summaries(run)] == before


@pytest.mark.parametrize("form", ["chrome", "otlp"])
def test_an_export_says_what_is_not_in_it(tmp_path, capsys, form):
    """Else the half of a run would look like the whole; a whole run has nothing said of it."""
    run, out = a_run(tmp_path / "run", compacted=True), str(tmp_path / "out.json")
    assert main(["export", str(run), "--to", form, "-o", out]) == 0
    assert capsys.readouterr().err == ""
    (parquet,) = (run / HOSTS[1]).glob(PARQUET)
    garble(parquet)

    assert main(["export", str(run), "--to", form, "-o", out]) == 0
    told = f"otel-dltrace: without what cannot be read in {run}: {parquet.relative_to(run)} is damaged\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        pytest.param("chrome", "rank 1 is not in this run; it has 0", id="chrome"),
        pytest.param("otlp", "rank 1 is not in this run; it has ranks 0 to 0", id="otlp"),
        pytest.param("horovod", "rank 1 is not in this run; it has 0", id="horovod"),
    ],
)
def test_a_rank_that_may_have_been_in_a_damaged_file_is_not_just_missing_in_an_export(tmp_path, capsys, form, missing):
    """Of a run whose every file is damaged, each is named once."""
    run, out = a_run(tmp_path / "run", compacted=True), str(tmp_path / "out.json")
    first, second = (next((run / host).glob(PARQUET)) for host in HOSTS)
    garble(second)
    assert main(["export", str(run), "--to", form, "--rank", "1", "-o", out]) == 2
    told = f"{second.relative_to(run)} is damaged"
    assert capsys.readouterr().err == (f"otel-dltrace: {missing}, without what cannot be read in {run}: {told}\n")
    garble(first)

    assert main(["export", str(run), "--to", form, "-o", out]) == 2
    assert capsys.readouterr().err.count(f"{first.relative_to(run)} is damaged; {told}\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("compare", "{whole}"), id="compare"),
        pytest.param(("report", "--by", "key"), id="by key"),
        pytest.param(("report", "--by", "negotiation"), id="by negotiation"),
    ],
)
def test_reports_without_a_last_line_say_it_as_well(tmp_path, capsys, command):
    """Half of a run is not compared as if it were the whole."""
    run, whole = a_run(tmp_path / "run", compacted=True), a_run(tmp_path / "whole", compacted=True)
    (parquet,) = (run / HOSTS[1]).glob(PARQUET)
    garble(parquet)

    assert main([*(word.format(whole=whole) for word in command), str(run)]) == 0
    told = f"otel-dltrace: without what cannot be read in {run}: {parquet.relative_to(run)} is damaged\n"
    assert capsys.readouterr().err == told


def test_a_file_that_was_there_at_the_end_is_missed(tmp_path, capsys):
    """Half of a host's spans are not all of them, and none is not none yet."""
    run = a_run(tmp_path / "run", compacted=True)
    first, second = (next((run / host).glob(PARQUET)) for host in HOSTS)
    second.unlink()
    told = f"{second.relative_to(run)} is missing: it was there at the run's end"
    assert damage_of(run) == [told]
    first.unlink()

    assert main(["report", str(run)]) == 2
    both = f"{first.relative_to(run)} is missing: it was there at the run's end; {told}"
    assert capsys.readouterr().err == f"otel-dltrace: {run}: no span can be read: {both}\n"


def test_a_link_to_a_disk_that_is_not_there_is_missed(tmp_path):
    """Its name is in the folder, and nothing is behind it."""
    run = a_run(tmp_path / "run", compacted=True)
    path = next((run / HOSTS[0]).glob(PARQUET))
    path.unlink()
    path.symlink_to(tmp_path / "disk" / path.name)

    assert damage_of(run) == [f"{path.relative_to(run)} is missing"]


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        pytest.param(cut, "is cut off", id="cut"),
        pytest.param(garble, "is damaged", id="garbled"),
        pytest.param(lambda path: copyfile(path.with_name(NAMES), path), "is not a file of a run", id="another's"),
    ],
)
def test_metrics_that_cannot_be_read_are_said(tmp_path, harm, what):
    """The report has fewer of them, or none; the last file of a drain at work may be torn."""
    run = a_run(tmp_path / "run", compacted=True)
    writer = MetricSegments(run / HOSTS[0], 1 << 20)
    for time in range(20):
        writer.append(batch_of([(time, NO_STEP, Point(SYSTEM_CPU_TIME, time))]))
    writer.close()
    path = run / HOSTS[0] / "metrics-00001.arrows"
    assert damage_of(run) == []
    harm(path)

    assert damage_of(run) == [f"{path.relative_to(run)} {what}"]


@pytest.mark.parametrize("left", [5, ["/etc/passwd"], ["../steps-1.parquet"], [["x"], "a\0b", "\ud800"]])
def test_what_is_no_name_of_a_file_is_not_missed(tmp_path, left):
    """The list itself may be damaged."""
    run = a_run(tmp_path / "run", compacted=True)
    path = run / HOSTS[0] / "drain.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": left}))

    assert damage_of(run) == []


def test_nothing_is_missed_that_became_parquet_or_went_by_the_quota_later(tmp_path):
    """As in a job's earlier run; of a segment in which there was no room for a row no Parquet speaks."""
    (batch, _), folder = ddp(2, steps=10), tmp_path / "run" / HOSTS[0]
    write(tmp_path / "run", "a", batch, compacted=False)
    (folder / "spans-00002.arrows").touch()
    writer = RunWriter(tmp_path / "run", folder.name)
    writer.open()
    writer.know(batch.process)
    writer.write_summary({}, ended=True)
    writer.close()
    assert read_summaries(tmp_path / "run")[0]["files"] == [SEGMENT]
    compact(folder)
    assert sum(keep_within(folder, 0)) > 0

    assert [path.name for path in folder.glob("s*")] == ["steps-00000000-00000009.parquet"]
    assert damage_of(tmp_path / "run") == []


def test_a_step_that_may_have_been_in_a_damaged_file_is_not_just_missing(tmp_path, capsys):
    """Nor a rank; of a run that has the step, what was opened says which rank's part is not there."""
    run, trace = a_run(tmp_path / "run", compacted=True), str(tmp_path / "step.json")
    first, second = (next((run / host).glob(PARQUET)) for host in HOSTS)
    garble(second)
    assert main(["open", str(run), "--step", "3", "--in", "perfetto", "-o", trace]) == 0
    told = f"{second.relative_to(run)} is damaged"
    assert f"otel-dltrace: without what cannot be read in {run}: {told}\n" in capsys.readouterr().err
    assert main(["report", str(run), "--rank", "1"]) == 2
    missing = "rank 1 is not in this run; it has 0, without what cannot be read:"
    assert capsys.readouterr().err == f"otel-dltrace: {run}: {missing} {told}\n"
    garble(first)

    assert main(["open", str(run), "--step", "3"]) == 2
    missing = f"otel-dltrace: step 3 is not in {run}; it has no steps, without what cannot be read: "
    assert capsys.readouterr().err == f"{missing}{first.relative_to(run)} is damaged; {told}\n"


def test_a_step_is_opened_whatever_is_told_of_the_budget(tmp_path, capsys):
    """One that is damaged is none: that of the environment holds."""
    run = a_run(tmp_path / "run", compacted=True)
    assert main(["open", str(run), "--step", "3"]) == 0
    address = capsys.readouterr().out
    path = run / HOSTS[0] / "drain.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "span_budget": ["x"]}))

    assert main(["open", str(run), "--step", "3"]) == 0
    assert capsys.readouterr().out == address


def test_a_run_of_which_there_is_nothing_to_report_hides_no_other(tmp_path, capsys):
    """As of a generation of an elastic job that has fewer ranks."""
    whole, part = a_run(tmp_path / "whole", compacted=False), tmp_path / "part"
    write(part, "a", ddp(2, steps=10)[0], compacted=False)
    assert main(["report", str(whole), "--rank", "1", "--json"]) == 0
    report = capsys.readouterr().out

    assert main(["report", str(part), str(whole), str(part), "--rank", "1", "--json"]) == 2
    told = f"otel-dltrace: {part}: rank 1 is not in this run; it has 0\n"
    assert capsys.readouterr() == (report, told * 2)


def test_a_folder_of_runs_names_them(tmp_path, capsys):
    """The newest first: one of them was meant."""
    for age, name in enumerate(["dltrace-new-1", "dltrace-old-2"]):
        run = a_run(tmp_path / name, compacted=False)
        os.utime(run / "run.json", (1000 - age, 1000 - age))

    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"otel-dltrace: {tmp_path} is not a run directory: it holds some; give one of them, the newest first: "
        "dltrace-new-1, dltrace-old-2\n"
    )


def test_what_leads_nowhere_is_said_in_a_sentence(tmp_path, capsys):
    """A link to itself, and a name that no file can have."""
    (tmp_path / "hosts").symlink_to("hosts")
    for run, why in ((tmp_path, "Too many levels of symbolic links"), (tmp_path / ("x" * 300), "File name too long")):
        assert main(["report", str(run)]) == 2
        assert capsys.readouterr().err == f"otel-dltrace: {run} cannot be read: {why}\n"


@pytest.mark.parametrize("closed", [".", "hosts", HOSTS[0]])
def test_a_run_that_may_not_be_read_is_said(capsys, closed):
    """A colleague's run on a shared disk: not a traceback, and not that the output cannot be written."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run = a_run(Path(folder, "run"), compacted=False)
        commands = [["report", str(run)], ["export", str(run), "--to", "otlp", "-o", "/dev/null"]]
        assert [main(command) for command in commands] == [0, 0]  # as nobody we may not read our own modules
        capsys.readouterr()
        (run / closed).chmod(0)
        with nobody():
            codes = [main(command) for command in commands]
        (run / closed).chmod(0o755)

    said = f"otel-dltrace: {run / closed}"
    lines = capsys.readouterr().err.splitlines()
    assert codes == [2, 2]
    assert all(line.startswith(said) and "permission denied; whoever wrote" in line for line in lines), lines


@pytest.mark.parametrize("name", ["run.json", "drain.json", "descriptors.arrows", SEGMENT, PARQUET])
def test_a_file_that_may_not_be_read_is_not_called_damaged(name):
    """Who wrote it can let us read it."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run = a_run(Path(folder, "run"), compacted=name == PARQUET)
        (file,) = run.glob(name) if name == "run.json" else (run / HOSTS[1]).glob(name)
        file.chmod(0)
        with nobody():
            (said,) = damage_of(run)

    assert said.startswith(f"{file.relative_to(run)} cannot be read: permission denied")


def said_of(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return on which ranks the report of *run* rests and what it calls damaged, having exported it, too."""
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert main(["export", "--to", "chrome", "-o", str(run.with_name("trace.json")), str(run)]) == 0
    damage = said.partition("without what cannot be read: ")[2].partition(". All times")[0]
    return said.partition("Rests on: ranks ")[2].partition(";")[0], damage


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"schema": "5"}',
        '{"schema": -1}',
        '{"schema": 0}',
        '{"schema": true}',
        "null",
        "{}",
        '"run"',
        "{",
        "[" * 100_000,
    ],
)
def test_a_run_that_does_not_tell_its_version_is_read_as_one_of_ours(tmp_path, capsys, text):
    """Its file can be JSON and yet not what we wrote."""
    run = a_run(tmp_path / "run", compacted=False)
    (run / "run.json").write_text(text)

    assert said_of(run, capsys) == ("0-1 of 2", "run.json is damaged: which version wrote the run is not known")


ENDLESS = """
import resource, sys
from pathlib import Path
from otel_dltrace.export.files import read_json

resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
assert read_json(Path(sys.argv[1])) is None
"""


def test_what_has_no_end_is_not_read(tmp_path):
    """A link to a device would fill the memory, and so would a sparse file."""
    sparse = tmp_path / "run.json"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    for path in ("/dev/zero", str(sparse)):
        subprocess.run([sys.executable, "-c", ENDLESS, path], check=True, timeout=60)


@pytest.mark.parametrize(
    "name", ["run.json", *(f"{HOSTS[0]}/{name}" for name in ("drain.json", NAMES, PARQUET, SEGMENT))]
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    """Nobody writes to it."""
    run = a_run(tmp_path / "run", compacted=name.endswith(PARQUET))
    (path,) = run.glob(name)
    path.unlink()
    os.mkfifo(path)

    report = [sys.executable, "-m", "otel_dltrace", "report", str(run)]
    done = subprocess.run(report, capture_output=True, text=True, timeout=60, check=True)
    assert f"{path.relative_to(run)} is damaged" in " ".join(done.stdout.split())


UNKNOWN = "whose spans these are is not known"


@pytest.mark.parametrize(
    ("told", "what"),
    [
        pytest.param({"processes": [{"nonce": 5}]}, "is damaged", id="number"),
        pytest.param({"processes": [None]}, "is damaged", id="none"),
        pytest.param([1], "is damaged", id="list"),
        pytest.param({"processes": 5}, "does not name 1 of 1 processes", id="no processes"),
        pytest.param({"summary": [2], "next_segment": "x"}, "does not name 1 of 1 processes", id="figures"),
    ],
)
def test_a_summary_that_is_json_and_no_summary_is_damaged(tmp_path, capsys, told, what):
    """The other host's is read; a drain that takes over begins a new one."""
    run = a_run(tmp_path / "run", compacted=False)
    (run / HOSTS[1] / "drain.json").write_text(json.dumps(told))

    assert said_of(run, capsys) == ("0 of 2, missing 1", f"{HOSTS[1]}/drain.json {what}: {UNKNOWN}")
    assert read_metrics(run) == []
    writer = RunWriter(run, host_folder_name("b", "boot"))
    writer.open()
    writer.write_summary({"spans": 3}, ended=True)
    writer.close()
    assert [told["summary"]["spans"] for told in read_summaries(run)][1:] == [3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", "one"),
        ("rank", -5),
        ("rank", 1 << 31),
        ("world_size", 1 << 70),
        ("anchor", "one"),
        ("pid", float("inf")),
        ("pid", 1 << 70),
        ("nonce", "f" * 17),
    ],
)
def test_a_process_with_a_field_of_another_kind_is_not_known(tmp_path, capsys, field, value):
    """Nothing is reckoned with a rank that is text, or beyond what a rank can be."""
    run = a_run(tmp_path / "run", compacted=False)
    path = run / HOSTS[1] / "drain.json"
    told = json.loads(path.read_text())
    (entry,) = told["processes"]
    (entry["bind"] if field in entry["bind"] else entry)[field] = value
    path.write_text(json.dumps(told))

    assert said_of(run, capsys) == ("0 of 2, missing 1", f"{HOSTS[1]}/drain.json is damaged: {UNKNOWN}")


@pytest.mark.parametrize("form", ["chrome", "otlp"])
def test_what_a_summary_tells_beside_who_wrote_harms_no_export(tmp_path, form):
    """Attributes that are none, and a generation that looks like a number: the spans are there with the rest."""
    run = a_run(tmp_path / "run", compacted=True)
    path = run / HOSTS[1] / "drain.json"
    told = json.loads(path.read_text())
    (entry,) = told["processes"]
    entry["resource"] = {"a": {}, "b": [1], "c": 1 << 70, "d": "kept"}
    entry["bind"]["generation"] = "\u00b2.0123456789abcdef"
    path.write_text(json.dumps({**told, "summary": {"otlp": 5}}))

    assert main(["export", str(run), "--to", form, "-o", str(tmp_path / "out.json")]) == 0
    assert [batch.process.resource for batch in read_run(run) if batch.rank == 1] == [(("d", "kept"),)]
    assert main(["open", str(run), "--step", "3"]) == 0


def of_one_host(root: Path, *, compacted: bool) -> Path:
    """Write a run of two ranks on one host."""
    for batch in ddp(2, steps=10):
        write(root, "a", batch, compacted=compacted)
    return root


def forget_all(summary: Path) -> None:
    """Remove what a drain wrote down."""
    summary.unlink()


def forget_one(summary: Path) -> None:
    """Have it name all processes but the last."""
    told = json.loads(summary.read_text())
    told["processes"].pop()
    summary.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("forget", "what", "ranks"),
    [(forget_all, "is missing", "none of 1"), (forget_one, "does not name 1 of 2 processes", "0 of 2, missing 1")],
)
def test_processes_that_a_summary_does_not_name_have_their_rank_in_a_parquet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forget: Callable[[Path], None], what: str, ranks: str
) -> None:
    """Compacted rows tell rank, role and wall time; those of segments do not, and no rank is made up for them."""
    whole, run = (of_one_host(tmp_path / name, compacted=True) for name in ("whole", "run"))
    live = of_one_host(tmp_path / "live", compacted=False)
    summary = f"{HOSTS[0]}/drain.json"
    for one in (run, live):
        forget(one / summary)

    assert said_of(run, capsys) == ("0-1 of 2", f"{summary} {what}: rank and role are those in the columns")
    assert [who(batch) for batch in read_run(run)] == [who(batch) for batch in read_run(whole)]
    assert said_of(live, capsys) == (ranks, f"{summary} {what}: {UNKNOWN}")
    main(["report", str(live)])
    assert "the run has one rank" not in capsys.readouterr().out


def test_who_takes_over_without_a_summary_hides_nothing(tmp_path):
    """Its segments are not called like those that a Parquet replaces, which would go with them."""
    run = of_one_host(tmp_path / "run", compacted=True)
    forget_all(run / HOSTS[0] / "drain.json")
    before = sum(map(len, read_run(run)))
    (again, _) = ddp(2, steps=5)
    write(run, "a", again, compacted=False)

    assert sum(map(len, read_run(run))) == before + len(again)


def who(batch: SpanBatch) -> tuple[Any, int, int]:
    """Return whose *batch* is, as far as a Parquet tells, its offset to wall time and its length."""
    assert batch.process.bind is not None
    return replace(batch.process.bind, local_rank=0, local_world_size=1), batch.wall, len(batch)


def test_a_file_of_somebody_else_is_left_out_and_said(tmp_path, capsys):
    """A Parquet, a stream and a names file with other columns; the quota goes on with ours."""
    run = a_run(tmp_path / "run", compacted=True)
    table = pa.table({"a": [1, 2]})
    folder = run / HOSTS[1]
    pq.write_table(table, folder / "steps-00000016-00000017.parquet")
    for name in ("spans-00099.arrows", NAMES):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)

    ranks, damage = said_of(run, capsys)
    assert (ranks, damage) == (
        "0-1 of 2",
        f"{HOSTS[1]}/steps-00000016-00000017.parquet is not a file of a run, {HOSTS[1]}/spans-00099.arrows is not a "
        f"file of a run, {HOSTS[1]}/{NAMES} is not a file of a run: some spans have no names",
    )
    assert sum(keep_within(folder, 0)) > 0
    assert columns.are_spans(pq.read_schema(next(folder.glob("steps-00000000-*"))))


@pytest.mark.parametrize("path_of", [SEGMENT, PARQUET, NAMES], ids=["segment", "parquet", "names"])
def test_a_value_that_is_missing_makes_a_file_none_of_ours(tmp_path, capsys, path_of):
    """A gap in what always has a value is no number and no text: whoever made such a file, no command fails for it."""
    run = a_run(tmp_path / "run", compacted=path_of != SEGMENT)
    path = next((run / HOSTS[1]).glob(path_of))
    in_parquet = path.suffix == ".parquet"
    table = pq.read_table(path) if in_parquet else pa.ipc.open_stream(path.read_bytes()).read_all()
    column = "kind" if path_of == NAMES else "process"
    at = table.column_names.index(column)
    table = table.set_column(at, table.field(at), pa.nulls(table.num_rows, table.field(at).type))
    if in_parquet:
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)

    what = "is not a file of a run" if in_parquet else "is damaged"
    end = ": some spans have no names" if path_of == NAMES else ""
    ranks = "0-1 of 2" if path_of == NAMES else "0 of 2, missing 1"
    assert said_of(run, capsys) == (ranks, f"{path.relative_to(run)} {what}{end}")
    assert main(["export", str(run), "--to", "chrome", "-o", str(tmp_path / "out.json")]) == 0


def test_a_column_that_is_there_twice_makes_a_file_none_of_ours(tmp_path, capsys):
    """Which of the two holds is not known."""
    run = a_run(tmp_path / "run", compacted=True)
    path = next((run / HOSTS[1]).glob(PARQUET))
    table = pq.read_table(path)
    pq.write_table(table.append_column("start", table.column("start")), path)

    assert said_of(run, capsys) == ("0 of 2, missing 1", f"{path.relative_to(run)} is not a file of a run")


def test_rows_that_name_nobody_without_a_summary_are_nobody_s(tmp_path):
    """A wall time that is a text, or none at all: whose the rows are is not known, and they are read."""
    for name, column in (("text", pa.array(["x"])), ("gap", pa.nulls(1, pa.int64()))):
        run = a_run(tmp_path / name, compacted=True)
        (run / HOSTS[1] / "drain.json").unlink()
        path = next((run / HOSTS[1]).glob(PARQUET))
        table = pq.read_table(path)
        at = table.column_names.index("start_unix_ns")
        values = pa.concat_arrays([column] * table.num_rows)
        pq.write_table(table.set_column(at, "start_unix_ns", values), path)

        assert [(batch.rank, len(batch) > 0) for batch in read_run(run)] == [(-1, True), (0, True)]


def test_metrics_that_are_no_number_are_left_out(tmp_path):
    """No sampler has seen them, and JSON has no word for them."""
    run = a_run(tmp_path / "run", compacted=True)
    writer = MetricSegments(run / HOSTS[0], 1 << 20)
    values = (1.0, float("nan"), float("inf"))
    writer.append(batch_of([(time, NO_STEP, Point(SYSTEM_CPU_TIME, value)) for time, value in enumerate(values)]))
    writer.close()

    assert [batch.value.tolist() for batch in read_metrics(run)] == [[1.0]]


def test_a_source_that_no_time_has_is_told_as_the_loosest(tmp_path, capsys):
    """A file may hold any number there."""
    run = a_run(tmp_path / "run", compacted=True)
    path = next((run / HOSTS[1]).glob(PARQUET))
    table = pq.read_table(path)
    at = table.column_names.index("source")
    pq.write_table(table.set_column(at, table.field(at), pa.array([255] * table.num_rows, pa.uint8())), path)

    assert main(["report", str(run), "--json"]) == 0
    assert {row["source"] for row in json.loads(capsys.readouterr().out)["operations"]} == {"bound"}


def wipe_the_second_batch(folder: Path) -> Path:
    """Put zeros where the second of three batches begins, as a file system may that lost power; return its segment."""
    rows = ddp(2, steps=10)[1]
    writer = RunWriter(folder.parents[1], folder.name)
    writer.open()
    ends = []
    for _ in range(3):
        writer.append(rows.process.nonce, rows.rows, rows.descriptors, rows.errors)
        ends.append(next(folder.glob("spans-*")).stat().st_size)
    writer.close()
    (segment,) = folder.glob("spans-*")
    with segment.open("r+b") as file:
        file.seek(ends[0])
        file.write(bytes(64))
    return segment


def test_compaction_leaves_segments_that_are_damaged_or_somebody_else_s(tmp_path, capsys):
    """It goes on with the others; what can be read of them is still read, and they are still named."""
    run = a_run(tmp_path / "run", compacted=True)
    folder = run / HOSTS[1]
    damaged = wipe_the_second_batch(folder)
    foreign, torn = folder / "spans-00098.arrows", folder / "spans-00099.arrows"
    torn.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 4])
    with pa.OSFile(str(foreign), "wb") as sink, pa.ipc.new_stream(sink, pa.schema([("a", pa.int64())])):
        pass
    before, told = spans_of(run), damage_of(run)

    assert compact(folder) == 1
    assert compact(folder) == 0
    assert spans_of(run) == before
    names = [str(path.relative_to(run)) for path in (damaged, foreign)]
    assert damage_of(run) == [f"{names[0]} is cut off", f"{names[1]} is not a file of a run"] == told[:2]


def test_the_quota_leaves_a_parquet_that_is_damaged(tmp_path):
    """Written anew its numbers would have checksums again; the others give what the quota asks for."""
    run = a_run(tmp_path / "run", compacted=True)
    folder = run / HOSTS[1]
    whole = next(folder.glob(PARQUET))
    broken, flipped = (folder / f"steps-0000000{n}-00000009.parquet" for n in (1, 2))
    broken.write_bytes(whole.read_bytes()[:-8])
    content = bytearray(whole.read_bytes())
    content[len(content) // 4] ^= 1
    flipped.write_bytes(content)

    assert sum(keep_within(folder, 0)) > 0
    assert damage_of(run) == [f"{path.relative_to(run)} is damaged" for path in (broken, flipped)]


def test_a_whole_run_is_not_called_damaged(tmp_path, capsys):
    """Nor is one whose last segment is still being written."""
    whole = a_run(tmp_path / "whole", compacted=True)
    live = a_run(tmp_path / "live", compacted=False)
    for host in HOSTS:
        summary = live / host / "drain.json"
        summary.write_text(summary.read_text().replace('"ended": true', '"ended": false'))
        segment = live / host / SEGMENT
        segment.write_bytes(segment.read_bytes()[:-4])

    assert main(["report", str(whole)]) == 0
    of_whole = capsys.readouterr().out
    assert main(["report", str(live)]) == 0
    of_live = capsys.readouterr().out
    assert "damaged" not in of_whole + of_live
    assert ["more may come" in out for out in (of_whole, of_live)] == [False, True]


def spans_of(run: Path) -> list[list[tuple[Any, ...]]]:
    """Return every value of every span, by process."""
    return [batch.rows[list(batch.rows.dtype.names)].tolist() for batch in read_run(run)]


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_in_a_parquet_is_told_or_changes_no_span(tmp_path, seed):
    """Its pages have checksums: no number is taken for one that was measured, and nothing is missing unsaid."""
    run, choose = a_run(tmp_path / "run", compacted=True), random.Random(seed)
    path = next((run / HOSTS[1]).glob(PARQUET))
    whole, before = path.read_bytes(), spans_of(run)
    for _ in range(120):
        flipped = bytearray(whole)
        flipped[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        path.write_bytes(flipped)

        assert damage_of(run) or spans_of(run) == before


def test_a_name_that_ends_outside_its_file_ends_no_report(tmp_path, capsys):
    """Where a text ends is a number in the file, too, which Arrow believes unless it is asked to look."""
    run = a_run(tmp_path / "run", compacted=True)
    path = run / HOSTS[1] / NAMES
    kinds = [one.kind for one in ddp(2, steps=10)[1].descriptors]
    ends = columns.strings(kinds).buffers()[1].to_pybytes()
    content = path.read_bytes()
    assert content.count(ends) == 1
    path.write_bytes(content.replace(ends, ends[:-1] + b"\x80"))

    told = f"{HOSTS[1]}/{NAMES} is damaged: some spans have no names"
    assert said_of(run, capsys) == ("0-1 of 2", told)


def test_a_damaged_number_of_a_name_leaves_the_other_names(tmp_path):
    """The names after it keep their places."""
    run = a_run(tmp_path / "run", compacted=True)
    path = run / HOSTS[1] / NAMES
    (names,) = read_descriptors(run / HOSTS[1]).values()
    numbers = b"".join(n.to_bytes(4, "little") for n in range(len(names)))
    path.write_bytes(path.read_bytes().replace(numbers, b"\x40" + numbers[1:]))

    (damaged,) = read_descriptors(run / HOSTS[1]).values()
    assert damaged == [OTHER, *names[1:]]


@pytest.mark.parametrize("text", ['{"a": "b\x00"}', '{"a', "[1]"])
def test_attributes_that_are_damaged_are_none(text):
    """A metric is read without them."""
    assert attributes_of(text) == {}
