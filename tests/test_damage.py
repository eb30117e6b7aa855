"""A damaged run directory: what can be read is reported, and what cannot is said."""

from pathlib import Path

import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.compaction import compact
from otel_dltrace.export.rundir import RunWriter, host_folder_name
from otel_dltrace.model.spans import SpanBatch
from tests.runs import ddp

HOSTS = ("hosts/a-boot", "hosts/b-boot")
SEGMENT, PARQUET, NAMES = "spans-00001.arrows", "steps-*.parquet", "descriptors.arrows"


def a_run(root: Path, *, compacted: bool) -> Path:
    """Write a run of two ranks, each on a host of its own."""
    for host, batch in zip("ab", ddp(2, steps=10), strict=True):
        write(root, host, batch, compacted=compacted)
    return root


def write(root: Path, host: str, batch: SpanBatch, *, compacted: bool) -> None:
    """Write what one host's drain would."""
    assert batch.process.bind is not None
    writer = RunWriter(root, host_folder_name(host, "boot"))
    writer.open()
    writer.name_run(batch.process.bind)
    writer.append(batch.process.nonce, batch.rows, batch.descriptors, batch.errors)
    writer.know(batch.process)
    writer.close_segment()
    if compacted:
        compact(writer.folder, writer.number)
    writer.write_summary({"spans": len(batch)}, ended=True)
    writer.close()


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
    assert f"; without what is damaged: {told}. All times" in said


def test_a_whole_run_is_not_called_damaged(tmp_path, capsys):
    """Nor is one whose last segment is still being written."""
    whole = a_run(tmp_path / "whole", compacted=True)
    live = a_run(tmp_path / "live", compacted=False)
    for host in HOSTS:
        summary = live / host / "drain.json"
        summary.write_text(summary.read_text().replace('"ended": true', '"ended": false'))
        segment = live / host / SEGMENT
        segment.write_bytes(segment.read_bytes()[:-4])

    assert main(["report", str(whole)]) == main(["report", str(live)]) == 0
    assert "damaged" not in capsys.readouterr().out
