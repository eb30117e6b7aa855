"""`otel-dltrace import horovod` and the way back: real files become a run on which everything works."""

import gzip
import json
import subprocess
import sys
import zlib

import numpy as np
import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.foreign import horovod_in
from otel_dltrace.export.outgoing.as_sent import as_sent
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.model import semconv as s
from tests.support.horovod_files import FILES, ODD, REAL, SMALL, WHOLE, timeline, unpack
from tests.support.processes import attributes_of


def imported(tmp_path, *paths):
    """Import *paths* into a new run directory; return it."""
    run = tmp_path / "RUN"
    assert main(["import", "horovod", *map(str, paths), "-o", str(run)]) == 0
    return run


@pytest.mark.parametrize("name", WHOLE)
def test_import_and_export_give_the_same_file(name, tmp_path, capsys):
    """Every byte, also of what a kill ended or what begins in the middle."""
    run, out = imported(tmp_path, unpack(name, tmp_path)), tmp_path / "out.json"

    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 0
    assert out.read_bytes() == timeline(name)


@pytest.mark.parametrize("name", [*SMALL, "horovod_mpi_np2_no_collectives"])
def test_every_sample_is_imported_or_refused_in_words(name, tmp_path, capsys):
    """What holds no event makes no run, and says why; all else makes one, of which a JSON file can be written."""
    path, run, out = unpack(name, tmp_path), tmp_path / "RUN", tmp_path / "out.json"
    code = main(["import", "horovod", str(path), "-o", str(run)])
    said = capsys.readouterr()
    has_events = b'"ts"' in timeline(name)

    assert (code, run.exists()) == ((0, True) if has_events else (2, False))
    assert "spans from 1 file\n" in said.out or "there is nothing to import" in said.err
    if has_events:
        assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 0
        assert sum("ts" in event for event in json.loads(out.read_text())) == timeline(name).count(b'"ts"')
        assert (f"note: {path}: " in said.out) is (name in ODD or "unbalanced" in name or "orphan" in name)


def test_a_run_that_cannot_be_made_is_told_by_its_own_name(tmp_path, capsys):
    """Not by the one that it has until it is whole."""
    assert main(["import", "horovod", str(unpack(WHOLE[0], tmp_path)), "-o", "/proc/x"]) == 2

    assert capsys.readouterr().err == "otel-dltrace: /proc/x cannot be written: No such file or directory\n"


def test_a_run_says_who_wrote_it(tmp_path):
    """It is of rank 0, of as many ranks as were ready, at the times of the day that the file tells."""
    run = imported(tmp_path, unpack("horovod_mpi_np4_psets", tmp_path))
    (batch,) = read_run(run)
    (drain,) = read_summaries(run)
    first = json.loads(timeline("horovod_mpi_np4_psets"))[0]["args"]["start_time_since_epoch_in_micros"]
    operations = batch.rows[batch.is_kind(s.COLLECTIVE)]

    assert (batch.rank, batch.process.bind.world_size, batch.process.bind.job_name) == (0, 4, "horovod")
    assert (drain["ended"], drain["summary"]["spans"]) == (True, len(batch))
    assert int(operations["start"].min()) == (first + 11459) * 1000


def test_spans_carry_what_horovod_says(tmp_path):
    """An operation its tensor, bytes, type and occurrence; an activity its name; a ready tick whose it is."""
    (batch,) = read_run(imported(tmp_path, unpack("horovod_mpi_np4_psets", tmp_path)))
    attributes = attributes_of(batch)

    def of(name):
        return attributes[int(np.flatnonzero(batch.lookup(lambda d: d.name == name, bool))[0])]

    tensor = {s.DL_TENSOR_NAME: "allreduce.global", s.DL_COMM_BACKEND: "horovod", s.DL_TIME_SOURCE: "host_done"}
    assert of("allreduce") == {
        s.DL_COMM_OPERATION: "allreduce",
        s.DL_COMM_ASYNC: False,
        **tensor,
        s.DL_COMM_DTYPE: "float32",
        s.DL_COMM_SIZE: 400,
        s.DL_COMM_SEQ: 1,
        s.DL_COMM_COLLECTIVE_ID: "bf9dac8e1f03c4a5",
        s.DL_STEP: 0,
    }
    assert of("MPI_ALLREDUCE") == {**tensor, s.DL_ACTIVITY: "MPI_ALLREDUCE", s.DL_STEP: 0}
    assert of("ready") == {**tensor, s.DL_COMM_PEER_RANK: 1, s.DL_STEP: 0}


def test_the_same_file_gives_the_same_ids(tmp_path):
    """Wherever it lies: nothing is doubled in a back end, and another file gives others."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    ids = [
        read_run(imported(tmp_path / folder, unpack(name, tmp_path / folder)))[0]["span_id"].tolist()
        for folder, name in (("a", REAL[3]), ("b", REAL[3]), ("c", "hvd_real_HEAD_reinit_gen0"))
    ]

    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(ids[0])
    assert not set(ids[0]) & set(ids[2])


def test_a_long_file_is_written_in_parts(tmp_path, monkeypatch):
    """Memory does not grow with it, and the parts make one whole."""
    monkeypatch.setattr(horovod_in, "_AT_ONCE", 50)
    run, out = imported(tmp_path, unpack("horovod_gloo_np2_ops", tmp_path)), tmp_path / "out.json"
    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 0

    assert len(read_run(run)) == 1
    assert out.read_bytes() == timeline("horovod_gloo_np2_ops")


def test_all_that_reads_runs_reads_an_imported_one(tmp_path, capsys):
    """The report knows the steps and operations, and every exporter writes them."""
    run = imported(tmp_path, unpack("horovod_mpi_np2", tmp_path))
    capsys.readouterr()
    assert main(["report", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for form in ("chrome", "otlp"):
        assert main(["export", str(run), "--to", form, "-o", str(tmp_path / form)]) == 0
    spans = sum(len(batch) for batch in read_run(run))

    guards = report["guards"]
    assert (guards["ranks"], guards["missing"], guards["steps"]) == ([0], [1], [0, 19])
    assert len(json.loads((tmp_path / "chrome").read_text())["traceEvents"]) > spans
    # A trace for each step, with a root.
    assert sum(len(batch) for batch in as_sent([run])) == spans + 20


def test_several_timelines_follow_each_other(tmp_path):
    """Those of a job that started again, or started its timeline again: steps go on, each comes back apart."""
    names = ("hvd_real_HEAD_reinit_gen0", "hvd_real_HEAD_reinit_gen1_overwrote")
    run = imported(tmp_path, *(FILES / f"{name}.json" for name in names))
    out = tmp_path / "out"

    assert [int(batch["step"].min()) for batch in read_run(run)] == [0, 1]
    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 0
    assert [path.read_bytes() for path in sorted(out.iterdir())] == [timeline(name) for name in names]


def test_a_directory_keeps_what_an_export_does_not_write(tmp_path, monkeypatch, capsys):
    """What is not of this export is said: a timeline by its number, anything else is the user's."""
    monkeypatch.chdir(tmp_path)  # which what is written is named from, where that is shorter
    names = ("hvd_real_HEAD_reinit_gen0", "hvd_real_HEAD_reinit_gen1_overwrote")
    run, out = imported(tmp_path, *(FILES / f"{name}.json" for name in names)), tmp_path / "out"
    out.mkdir()
    for name in ("1.json", "2.json", "x.json"):
        (out / name).write_text("old")
    capsys.readouterr()

    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out == "out/0.json, out/1.json: 18 events, 0.0 MB\n"
    assert told.err == "otel-dltrace: out/2.json is from an earlier export, and not part of this one\n"
    assert (out / "1.json").read_bytes() == timeline(names[1])
    assert [(out / name).read_text() for name in ("2.json", "x.json")] == ["old", "old"]


def test_several_timelines_need_a_directory(tmp_path, capsys):
    """A file that is there already is left alone."""
    names = ("hvd_real_HEAD_reinit_gen0", "hvd_real_HEAD_reinit_gen1_overwrote")
    run, out = imported(tmp_path, *(FILES / f"{name}.json" for name in names)), tmp_path / "out.json"
    out.write_text("old")

    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 2
    says = f"otel-dltrace: {out} takes one timeline, and there are 2; give -o the name of a new directory\n"
    assert (capsys.readouterr().err, out.read_text()) == (says, "old")


def test_the_steps_of_all_timelines_are_told(tmp_path, capsys):
    """Whichever came first: the report and the comparison have the steps of each, and none of what is between."""
    files, steps = [], []
    for name in ("horovod_mpi_np2", "horovod_gloo_np2_ops"):
        (tmp_path / name).mkdir()
        files.append(str(unpack(name, tmp_path / name)))
    for number, chosen in enumerate([files[:1], files[1:], files, files[::-1]]):
        run = tmp_path / f"run-{number}"
        assert main(["import", "horovod", *chosen, "-o", str(run)]) == 0
        steps.append(len(np.unique(np.concatenate([batch["step"][batch.is_rank_step] for batch in read_run(run)]))))
    capsys.readouterr()
    told = []
    for number in range(4):
        assert main(["report", str(tmp_path / f"run-{number}"), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        (timing,) = report["throughput"]["ranks"]
        told.append((report["guards"]["common_steps"], report["guards"]["unused"], timing["rates"]["seconds"] < 60))
    assert main(["compare", str(tmp_path / "run-0"), str(tmp_path / "run-2"), "--json"]) == 0
    compared = [run["first"]["steps"] + run["steady"]["steps"] for run in json.loads(capsys.readouterr().out)["runs"]]

    assert steps[2] == steps[3] == steps[0] + steps[1]
    assert told == [(count, 0, True) for count in steps]
    assert compared == [steps[0], steps[2]]


@pytest.mark.parametrize("folder", [False, True], ids=["by name", "in a folder"])
def test_a_gzipped_timeline_is_read(folder, tmp_path, capsys):
    """As it is exported; it is the same run as the file that is in it."""
    place, out = tmp_path / "a", tmp_path / "out.json"
    place.mkdir()
    plain = imported(place, unpack("horovod_mpi_np2", tmp_path))
    assert main(["export", str(plain), "--to", "horovod", "-o", str(place / "timeline.json.gz")]) == 0
    run = imported(tmp_path, place if folder else place / "timeline.json.gz")
    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 0

    assert (place / "timeline.json.gz").read_bytes().startswith(b"\x1f\x8b")
    assert out.read_bytes() == timeline("horovod_mpi_np2")
    assert read_run(run)[0]["span_id"].tolist() == read_run(plain)[0]["span_id"].tolist()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_a_pipe_is_read(pack, tmp_path):
    """As from `zcat timeline.json.gz`: it can be read but once, and has no name to go by. It is the same run."""
    data = timeline("horovod_mpi_np2")
    command = [sys.executable, "-m", "otel_dltrace", "import", "horovod", "/dev/stdin", "-o", str(tmp_path / "RUN")]
    subprocess.run(command, input=pack(data), check=True, timeout=60)
    (tmp_path / "plain").mkdir()
    out, plain = tmp_path / "out.json", imported(tmp_path / "plain", unpack("horovod_mpi_np2", tmp_path))

    assert main(["export", str(tmp_path / "RUN"), "--to", "horovod", "-o", str(out)]) == 0
    assert out.read_bytes() == data
    assert read_run(tmp_path / "RUN")[0]["span_id"].tolist() == read_run(plain)[0]["span_id"].tolist()


def test_a_timeline_in_utf16_is_refused_with_what_to_do(tmp_path, capsys):
    """As an editor of Windows saves it: it was called one that ends inside a record."""
    wide = tmp_path / "timeline.json"
    wide.write_bytes(timeline("horovod_mpi_np2").decode().encode("utf-16"))
    assert main(["import", "horovod", str(wide), "-o", str(tmp_path / "RUN")]) == 2
    assert f"{wide} is UTF-16, but a timeline is UTF-8; give the output of `iconv -f UTF-16" in capsys.readouterr().err


def test_of_a_torn_gzip_what_can_be_unpacked_is_read(tmp_path, capsys):
    """It is the run of the text that `zcat` still gives, and a sentence tells of the damage."""
    torn, text = tmp_path / "torn.json.gz", tmp_path / "torn.json"
    torn.write_bytes(gzip.compress(timeline("horovod_mpi_np2"))[:-2000])
    text.write_bytes(zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(torn.read_bytes()))
    (tmp_path / "plain").mkdir()
    plain = imported(tmp_path / "plain", text)
    capsys.readouterr()
    run = imported(tmp_path, torn)

    assert f"note: {torn}: its gzip is damaged (Compressed file ended " in capsys.readouterr().out
    assert read_run(run)[0]["span_id"].tolist() == read_run(plain)[0]["span_id"].tolist()


def test_of_a_gzip_that_is_not_what_it_was_it_is_said(tmp_path, capsys):
    """Its checksum tells, when all of it has been unpacked."""
    packed, size = bytearray(gzip.compress(timeline("horovod_mpi_np2"))), len(timeline("horovod_mpi_np2"))
    packed[-6] ^= 1
    (tmp_path / "flipped.json.gz").write_bytes(packed)
    imported(tmp_path, tmp_path / "flipped.json.gz")
    assert f"{size:,} bytes could be unpacked, perhaps not correctly; anything" in capsys.readouterr().out


def test_a_gzip_of_which_nothing_is_left_is_refused(tmp_path, capsys):
    """In a sentence, and nothing is left of the run."""
    torn, run = tmp_path / "torn.json.gz", tmp_path / "RUN"
    torn.write_bytes(gzip.compress(timeline("horovod_mpi_np2"))[:12])

    assert main(["import", "horovod", str(torn), "-o", str(run)]) == 2
    assert f"{torn}: its gzip is damaged" in capsys.readouterr().err
    assert not run.exists()


def test_a_mark_before_the_text_costs_nothing(tmp_path, monkeypatch, capsys):
    """Some editors put one in front of UTF-8; in a directory the file is found as well."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.json"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "timeline.json").write_bytes(b"\xef\xbb\xbf" + timeline("horovod_mpi_np2"))
    run = imported(tmp_path, tmp_path / "files")
    told = capsys.readouterr().out.splitlines()

    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 0
    assert out.read_bytes() == timeline("horovod_mpi_np2")
    assert [line.partition(":")[0] for line in told] == [run.name, "note"]


BYTEPS = FILES.parent / "byteps"


@pytest.mark.parametrize(("form", "name"), [("horovod", "c.json"), ("horovod", "c.json.gz"), ("byteps", "c.json")])
def test_a_chrome_trace_of_ours_is_no_timeline(form, name, tmp_path, capsys):
    """What reads the run that it was made from is said, and no run is made of it."""
    run, trace = imported(tmp_path, unpack("horovod_mpi_np2", tmp_path)), tmp_path / name
    assert main(["export", str(run), "--to", "chrome", "-o", str(trace)]) == 0
    capsys.readouterr()

    assert main(["import", form, str(trace), "-o", str(tmp_path / "again")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"otel-dltrace: {trace} is a Chrome trace as `otel-dltrace export --to chrome` writes it, ")
    assert said.endswith("; give the run directory that it was made from to `otel-dltrace report` or `export`\n")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "path", [path for path in sorted(BYTEPS.glob("bps_*")) if b'"tid"' in path.read_bytes()], ids=lambda path: path.stem
)
def test_files_of_byteps_are_no_timeline(path, tmp_path, capsys):
    """Which command reads them is said."""
    assert main(["import", "horovod", str(path), "-o", str(tmp_path / "RUN")]) == 2
    says = f"{path} is BytePS's, not a timeline of Horovod; read it with `otel-dltrace import byteps`"
    assert capsys.readouterr().err == f"otel-dltrace: {says}\n"


@pytest.mark.parametrize("name", REAL)
def test_a_timeline_is_none_of_byteps_s_files(name, tmp_path, capsys):
    """Which command reads it is said; before, its events were only counted as none of BytePS."""
    path = unpack(name, tmp_path)
    assert main(["import", "byteps", str(path), "-o", str(tmp_path / "RUN")]) == 2
    says = f"{path} is a timeline of Horovod, not BytePS's; read it with `otel-dltrace import horovod`"
    assert capsys.readouterr().err == f"otel-dltrace: {says}\n"


@pytest.mark.parametrize("form", ["horovod", "byteps"])
def test_files_of_bytescheduler_are_neither(form, tmp_path, capsys):
    """Which command reads them is said."""
    path = BYTEPS / "bytescheduler_hand.json"
    assert main(["import", form, str(path), "-o", str(tmp_path / "RUN")]) == 2
    says = f"{path} is ByteScheduler's; read it with `otel-dltrace import bytescheduler`"
    assert capsys.readouterr().err == f"otel-dltrace: {says}\n"


def test_steps_can_be_chosen(tmp_path):
    """The rest of the file is left out; times count from the first event, and the day stays right."""
    run, out = imported(tmp_path, unpack("horovod_mpi_np2", tmp_path)), tmp_path / "out.json"
    assert main(["export", str(run), "--to", "horovod", "-o", str(out), "--steps", "3-4"]) == 0
    (start, *_), whole = (json.loads(text) for text in (out.read_text(), timeline("horovod_mpi_np2")))
    events = [event for event in json.loads(out.read_text()) if "ts" in event]
    origins = [found["args"]["start_time_since_epoch_in_micros"] for found in (start, whole[0])]
    ends = {event["ts"] + origins[1] for event in whole if event["ph"] == "E"}

    assert events[0]["ts"] == 0
    assert sum(event.get("name") == "ALLREDUCE" for event in events) == 24
    assert all(event["ts"] + origins[0] in ends for event in events if event["ph"] == "E")


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        (["nowhere"], "nowhere: No such file or directory"),
        (["."], "holds no timeline of Horovod"),
    ],
)
def test_what_cannot_be_imported_is_refused(paths, error, tmp_path, capsys, monkeypatch):
    """With exit code 2, one sentence, and nothing left behind."""
    monkeypatch.chdir(tmp_path)

    assert main(["import", "horovod", *paths, "-o", "RUN"]) == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_gives_its_timelines(tmp_path):
    """Other JSON files in it are not taken for one."""
    folder = tmp_path / "files"
    folder.mkdir()
    unpack("horovod_mpi_np4_psets", folder)
    (folder / "other.json").write_text('{"a": 1}')

    assert len(read_run(imported(tmp_path, folder))) == 1


def test_a_run_without_horovod_is_no_timeline(tmp_path, capsys):
    """Nothing is written for what its timeline cannot hold."""
    run, out = tmp_path / "RUN", tmp_path / "out.json"
    comm = FILES.parent / "byteps" / "bps_hand_comm_root.json"
    assert main(["import", "byteps", str(comm), "-o", str(run)]) == 0
    assert main(["export", str(run), "--to", "horovod", "-o", str(out)]) == 2
    assert "the run has no activity of Horovod" in capsys.readouterr().err
    assert not out.exists()
