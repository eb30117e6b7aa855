"""Where `export -o` writes: a file is replaced whole, a link is followed, a pipe or a device stays what it is."""

import gzip
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from otel_dltrace.cli.main import main, make_parser
from otel_dltrace.export.chrome.rotation import part_path
from otel_dltrace.export.files import open_whole, write_whole
from tests.support.byteps_files import unpack
from tests.support.run_files import a_run

on_linux = pytest.mark.skipif(not Path("/proc/self/fd/1").exists(), reason="no link to standard output here")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Give a small run."""
    return a_run(tmp_path / "run", compacted=False)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Give a pipe that has a name."""
    os.mkfifo(tmp_path / "pipe.gz")
    return tmp_path / "pipe.gz"


def export(run: Path, out: Path, *more: str) -> int:
    return main(["export", str(run), "--to", "otlp", "-o", str(out), *more])


def test_a_run_that_is_named_twice_is_written_once(run, tmp_path):
    """A pattern finds it under its own name and that of a link: `export dltrace-*`."""
    (tmp_path / "latest").symlink_to(run)
    export(run, tmp_path / "once.jsonl")

    runs = [str(run), str(tmp_path / "latest"), f"{run}/"]
    assert main(["export", *runs, "--to", "otlp", "-o", str(tmp_path / "twice.jsonl")]) == 0
    assert (tmp_path / "twice.jsonl").read_text() == (tmp_path / "once.jsonl").read_text()


@pytest.mark.parametrize(
    "name", ["run.json", "hosts/a-boot/spans-00001.arrows", "hosts/a-boot/new", "../latest/run.json"]
)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["export", "--to", "otlp"], id="otlp"),
        pytest.param(["export", "--to", "byteps"], id="byteps"),
        pytest.param(["open", "--step", "1", "--in", "perfetto"], id="open"),
    ],
)
def test_a_run_is_not_written_over_by_what_is_read_from_it(run, tmp_path, capsys, command, name):
    """A slip in a long command costs no spans; beside them, in the run's folder, there is room for files."""
    (tmp_path / "latest").symlink_to(run)
    out = run / name
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    assert main([*command, str(run), "-o", str(out)]) == 2
    told = f"otel-dltrace: {out} is part of the run {run} itself, which is being read: give another place with -o\n"
    assert capsys.readouterr().err == told
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert export(run, run / "spans.jsonl") == 0


def test_a_name_in_capitals_says_gzip_as_well(run, tmp_path):
    """`.GZ` is what some file systems make of `.gz`; further files have their number before the whole ending."""
    export(run, tmp_path / "a.jsonl")
    assert export(run, tmp_path / "A.JSONL.GZ") == 0

    assert gzip.decompress((tmp_path / "A.JSONL.GZ").read_bytes()) == (tmp_path / "a.jsonl").read_bytes()
    assert part_path(tmp_path / "T.JSON.GZ", 1) == tmp_path / "T.1.JSON.GZ"


@pytest.mark.parametrize("before", ["old", None], ids=["to a file", "to nothing"])
def test_a_link_is_followed(run, tmp_path, before):
    """Who links a name to another disk finds the file there, and the link where it was."""
    link, target = tmp_path / "link.jsonl", tmp_path / "disk" / "target"
    target.parent.mkdir()
    link.symlink_to(target)
    if before:
        target.write_text(before)

    assert export(run, link) == 0
    assert link.readlink() == target
    assert all(json.loads(line)["resourceSpans"] for line in target.read_text().splitlines())
    assert list(target.parent.iterdir()) == [target]


def test_a_link_under_the_name_that_a_file_has_while_it_is_written_is_not_followed(tmp_path):
    """Where others may write they know that name."""
    path, precious = tmp_path / "trace.json", tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / f".trace.json.{os.getpid()}").symlink_to(precious)
    write_whole(path, b"[]")

    assert (path.read_text(), path.is_symlink(), precious.read_text()) == ("[]", False, "precious")


def test_a_failure_leaves_what_the_link_points_at(tmp_path):
    """Whole or not at all, through a link as well."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")

    with pytest.raises(ZeroDivisionError), open_whole(tmp_path / "link") as out:
        out.write(b"%d" % (1 / 0))
    assert (tmp_path / "link").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "link", tmp_path / "target"]


def test_a_pipe_is_written_to(run, pipe, capfd):
    """What reads at its other end gets everything, and the pipe is a pipe afterwards."""
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    assert export(run, pipe) == 0
    lines = gzip.decompress(os.read(reader, 1 << 16)).splitlines()
    os.close(reader)

    assert all(json.loads(line)["resourceSpans"] for line in lines)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert capfd.readouterr() == ("", "otel-dltrace: 150 spans written\n")


def test_a_pipe_takes_one_file(run, pipe, capsys):
    """Of several the others would lie beside it, in a folder that is none of ours."""
    assert main(["export", str(run), "--to", "chrome", "-o", str(pipe), "--max-bytes", "16K"]) == 2
    assert f"{pipe} takes one file, and this makes several; give -o a name for them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "place", "said"),
    [
        ("byteps", "file", "it is not a folder, and this writes files below one; give -o a folder"),
        ("chrome", "file/trace.json", "there is no folder {}/file; make it first"),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_told(form, place, said, tmp_path, capsys):
    """What the system says names neither which of them it is nor what to do."""
    run = tmp_path / "run"
    folder = unpack("byteps_w2_s1", tmp_path)
    assert main(["import", "byteps", str(folder), "-o", str(run)]) == 0
    (tmp_path / "file").write_text("mine")
    assert main(["export", str(run), "--to", form, "-o", str(tmp_path / place)]) == 2
    assert f"{tmp_path / place} cannot be written: {said.format(tmp_path)}\n" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def export_to_stdout(run: Path, folder: Path, stdout: int) -> "subprocess.CompletedProcess[str]":
    """Export *run* to a link to standard output, which is *stdout*."""
    link = folder / "stdout"
    link.symlink_to("/proc/self/fd/1")
    command = [sys.executable, "-m", "otel_dltrace", "export", str(run), "--to", "otlp", "-o", str(link)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=240, check=False)


@on_linux
def test_standard_output_goes_on_where_it_stands(run, tmp_path):
    """Under `>>` what was there is kept, and no word of ours is among the lines."""
    log = tmp_path / "log"
    log.write_text("{}\n")
    with log.open("a") as out:
        done = export_to_stdout(run, tmp_path, out.fileno())

    first, *lines = map(json.loads, log.read_text().splitlines())
    assert first == {}
    assert {name for line in lines for name in line} == {"resourceSpans"}
    assert (done.returncode, done.stderr) == (0, "otel-dltrace: 150 spans written\n")


@on_linux
def test_a_reader_that_has_ended_is_no_file_that_cannot_be_written(run, tmp_path):
    """`| head` leaves early; nobody has to be told."""
    read, write = os.pipe()
    os.close(read)
    done = export_to_stdout(run, tmp_path, write)
    os.close(write)

    assert (done.returncode, done.stderr) == (141, "")


def test_a_name_that_cannot_be_is_said(run, tmp_path, capsys):
    """It is too long for the file system."""
    assert export(run, tmp_path / ("x" * 300)) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "/"])
def test_a_folder_is_refused_before_anything_is_written(run, tmp_path, capsys, name):
    """A long run is not written first, to be thrown away."""
    assert export(run, tmp_path / name) == 2
    assert capsys.readouterr().err == f"otel-dltrace: {tmp_path / name} cannot be written: Is a directory\n"
    with pytest.raises(IsADirectoryError), open_whole(tmp_path / name):
        pytest.fail("it is opened")


def test_a_hyphen_is_standard_output():
    """As for every other command."""
    args = make_parser(["export"]).parse_args(["export", "RUN", "--to", "otlp", "-o", "-"])

    assert args.output == Path("/dev/stdout")
