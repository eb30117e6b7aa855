"""`otel-dltrace import byteps` and the way back: real files become a run on which everything works."""

import gzip
import json
import os
import shutil
import threading
from collections import defaultdict

import numpy as np
import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.outgoing.as_sent import as_sent
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.model import semconv as s
from otel_dltrace.model.server_keys import first_key
from tests.support.byteps_files import FILES, REAL, SMALL, real, unpack
from tests.support.processes import attributes_of


def imported(tmp_path, *paths, options=()):
    """Import *paths* into a new run directory; return it."""
    run = tmp_path / "RUN"
    assert main(["import", "byteps", *map(str, paths), "-o", str(run), *options]) == 0
    return run


@pytest.fixture
def two_workers(tmp_path):
    """A run imported from two real workers, which recorded from step 5 on."""
    return imported(tmp_path, unpack("byteps_w2_s1", tmp_path / "files"), options=("--start-step", "5"))


def test_a_run_of_two_workers_is_whole(two_workers, capsys):
    """Every event is a span, each worker a rank on a machine of its own, and the run says where it is from."""
    batches = read_run(two_workers)
    binds = [batch.process.bind for batch in batches]

    assert [(bind.rank, bind.local_rank, bind.node_rank, bind.world_size) for bind in binds] == [
        (0, 0, 0, 2),
        (1, 0, 1, 2),
    ]
    assert [int((~batch.is_kind(s.STEP)).sum()) for batch in batches] == [924, 924]
    assert [sorted(set(batch["step"].tolist())) for batch in batches] == [[*range(4, 15)]] * 2
    assert [(drain["ended"], drain["summary"]["spans"]) for drain in read_summaries(two_workers)] == [(True, 935)] * 2


def test_spans_carry_what_byteps_says(two_workers):
    """An operation names its tensor and key, a stage its queue type, key, partition and the wait in its queue."""
    batch = read_run(two_workers)[0]
    attributes = attributes_of(batch)
    pushes = np.flatnonzero(batch.lookup(lambda d: d.name == "PUSH", bool))
    push = int(pushes[0])
    operation = int(batch.rows["parent_no"][push]) - 1
    tensor = {s.DL_TENSOR_NAME: "byteps.Gradient.0.weight", s.DL_COMM_BACKEND: "byteps", s.DL_TIME_SOURCE: "host_done"}

    assert batch["parent_id"][push] == batch["span_id"][operation]
    assert attributes[operation] == {
        s.DL_COMM_OPERATION: "push_pull",
        s.DL_COMM_ASYNC: False,
        **tensor,
        s.DL_STEP: 4,
        s.DL_COMM_SEQ: 5,
        s.DL_COMM_SIZE: 0,
        s.DL_KEY: 65536,
        s.DL_COMM_COLLECTIVE_ID: "83b956b76582162e",
    }
    found = attributes[push]
    assert found.pop(s.DL_QUEUE_WAIT) > 0
    assert found == {**tensor, s.DL_QUEUE_TYPE: "PUSH", s.DL_STEP: 4, s.DL_KEY: 65536, s.DL_PARTITION: 0}


@pytest.mark.parametrize("run", ["byteps_w2_s1", "byteps_w1_l2_nodist"])
def test_import_and_export_give_the_same_files(run, tmp_path):
    """Folders, names and every byte."""
    files = unpack(run, tmp_path / "files")
    out = tmp_path / "out"
    assert main(["export", str(imported(tmp_path, files)), "--to", "byteps", "-o", str(out)]) == 0
    inner = files / "worker0" if run.endswith("nodist") else files  # of one machine, no folder is needed

    def contents(folder):
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.json")}

    assert contents(out) == contents(inner)


def test_local_ranks_of_one_machine_share_its_clock(tmp_path):
    """The folder is the local rank; ranks of one folder above are on one host."""
    batches = read_run(imported(tmp_path, unpack("byteps_w1_l2_nodist", tmp_path / "files")))

    assert [(b.rank, b.process.bind.local_rank, b.process.bind.node_rank) for b in batches] == [(0, 0, 0), (1, 1, 0)]
    assert len({batch.process.boot_id for batch in batches}) == 1


def test_the_same_files_give_the_same_ids(tmp_path):
    """Wherever they lie: nothing is doubled in a back end, and another file gives others."""
    files = unpack("byteps_w2_s1", tmp_path / "files")
    first = imported(tmp_path, files)
    shutil.move(files, tmp_path / "moved")
    (tmp_path / "again").mkdir()
    again = imported(tmp_path / "again", tmp_path / "moved")
    (tmp_path / "one").mkdir()
    one = imported(tmp_path / "one", tmp_path / "moved" / "worker0")

    def ids(run):
        return [batch["span_id"].tolist() for batch in read_run(run)]

    assert ids(again) == ids(first)
    assert len({number for of_rank in ids(first) for number in of_rank}) == 2 * 935
    assert not set(ids(one)[0]) & set(ids(first)[0])


def test_all_that_reads_runs_reads_an_imported_one(two_workers, tmp_path, capsys):
    """The report joins the push_pulls of both workers, and every exporter writes them."""
    capsys.readouterr()
    assert main(["report", str(two_workers), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for form in ("chrome", "otlp"):
        assert main(["export", str(two_workers), "--to", form, "-o", str(tmp_path / form)]) == 0
    trace = json.loads((tmp_path / "chrome").read_text())

    assert (report["guards"]["ranks"], report["guards"]["steps"]) == ([0, 1], [4, 14])
    assert (report["waits"]["joined"], report["waits"]["incomplete"]) == (132, 0)
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 2 * 935
    # A trace for each step, with the root that all ranks share.
    assert sum(len(batch) for batch in as_sent([two_workers])) == 2 * 935 + 11
    assert all(batch["parent_id"].all() for batch in as_sent([two_workers]) if len(batch) > 11)


def test_servers_join_the_workers(tmp_path, capsys):
    """A server's spans are in the traces of the same steps, and name the tensors that the workers know."""
    folder = tmp_path / "files"
    (folder / "0").mkdir(parents=True)
    comm = (FILES / "bps_hand_comm_root.json").read_bytes().replace(b"26148864", b"27000832")
    (folder / "0" / "comm.json").write_bytes(comm)
    shutil.copy(FILES / "bps_hand_server_profile_unclosed.json", folder / "server_profile.json")
    shutil.copy(FILES / "pslite_hand_van_server.txt", folder / "x_van_server")
    run = imported(tmp_path, folder, options=("--start-step", "1"))
    van, server, worker = sorted(read_run(run), key=len)
    out = tmp_path / "out.json"

    assert [(b.process.bind.role, b.rank) for b in (van, server, worker)] == [
        ("server", 0),
        ("server", 0),
        ("worker", 0),
    ]
    assert [server.descriptor_of(i).tensor for i in range(4)] == ["byteps.gradient_0"] * 4
    assert {tuple(map(int, (row["step"], row["seq"], row["b"]))) for row in server.rows} == {(0, 1, 0), (0, 1, 1)}
    assert main(["export", str(run), "--to", "byteps-server", "-o", str(out)]) == 0
    text = (FILES / "bps_hand_server_profile_unclosed.json").read_text()
    assert out.read_text() == text.rstrip() + "\n\t]\n}\n"
    capsys.readouterr()


def test_a_server_s_profile_is_found_whatever_its_name(tmp_path, capsys):
    """`BYTEPS_SERVER_PROFILE_OUTPUT_PATH` names any; what else lies there is not read."""
    (folder := tmp_path / "files").mkdir()
    shutil.copy(FILES / "bps_hand_server_profile_unclosed.json", folder / "node3.json")
    (folder / "notes.json").write_text('{"push-9": 1}')
    (folder / "empty").touch()
    imported(tmp_path, folder)

    assert capsys.readouterr().out.splitlines()[0].endswith("4 spans from 1 file")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_servers_are_written_apart(order, tmp_path):
    """They overwrote each other's file in BytePS; each is told from the others by its share of the keys."""
    folder = tmp_path / "files"
    folder.mkdir()
    names = ("bps_hand_server_profile_unclosed.json", "bps_hand_server1of2_profile_unclosed.json")
    for number, name in zip(order, names, strict=True):
        shutil.copy(FILES / name, folder / f"server_profile_{number}.json")
    run = imported(tmp_path, folder)
    out = tmp_path / "out" / "server_profile.json"

    assert main(["export", str(run), "--to", "byteps-server", "-o", str(out)]) == 0
    assert [b.process.bind.rank for b in read_run(run)] == [0, 1]
    keys = {
        path.parent.name: {e["pid"] for e in json.loads(path.read_text())["traceEvents"]}
        for path in out.parent.glob("*/server_profile.json")
    }
    assert keys == {"0": {27000832}, "1": {9223372036855234562}}


def test_one_of_several_servers_keeps_its_keys(tmp_path, capsys):
    """Its number, and how many there were, are in its keys; what is of another's number is told."""
    text = (FILES / "bps_hand_server_profile_unclosed.json").read_text()
    text = text.replace("27000832", str(first_key(1, 4) + 27000832)).rstrip() + "\n\t]\n}\n"
    (folder := tmp_path / "files").mkdir()
    for name in ("server_profile.json", "server_profile_copy.json"):
        (folder / name).write_text(text)
    run = imported(tmp_path, folder / "server_profile.json")
    assert main(["export", str(run), "--to", "byteps-server", "-o", str(tmp_path / "out" / "it.json")]) == 0
    (tmp_path / "both").mkdir()
    imported(tmp_path / "both", folder)

    assert [(path.parent.name, path.read_text()) for path in (tmp_path / "out").rglob("it.json")] == [("1", text)]
    doubled = (
        f"{folder}/server_profile_copy.json: {folder}/server_profile.json is of server 1 as well; it was taken to be 0"
    )
    assert doubled in capsys.readouterr().out


def test_van_profiles_come_back_as_they_were(tmp_path, capsys):
    """One as the file that was asked for, those of several nodes in a folder each."""
    lines = (FILES / "pslite_hand_van_server.txt").read_bytes()
    run, out = imported(tmp_path, FILES / "pslite_hand_van_server.txt"), tmp_path / "back"

    assert main(["export", str(run), "--to", "van", "-o", str(out)]) == 0
    assert out.read_bytes() == lines
    files = {"server-0/pslite_van_profile": lines, "server-1/pslite_van_profile": lines * 2}
    files["worker-0/pslite_van_profile"] = lines.replace(b"server", b"worker")
    folder = tmp_path / "files"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(data)
    run = imported(tmp_path / "several", folder)
    assert main(["export", str(run), "--to", "van", "-o", str(out)]) == 2
    assert "back takes one profile, and there are 3; give -o the name of a new directory" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "van", "-o", str(tmp_path / "all")]) == 0
    assert {str(path.relative_to(tmp_path / "all")): path.read_bytes() for path in tmp_path.glob("all/*/*")} == files


@pytest.mark.parametrize("name", [*SMALL, "pslite_hand_van_server.txt"])
def test_every_sample_is_imported_or_refused_in_words(name, tmp_path, capsys):
    """What holds no event makes no run, and says why; all else makes one."""
    run = tmp_path / "RUN"
    code = main(["import", "byteps", str(FILES / name), "-o", str(run)])
    said = capsys.readouterr()

    assert (code, run.exists()) == ((2, False) if "empty" in name else (0, True))
    assert "spans from 1 file\n" in said.out or "there is nothing to import" in said.err
    assert list(tmp_path.iterdir()) == ([run] if run.exists() else [])


def test_a_file_without_events_is_refused_for_that(tmp_path, capsys):
    """It is whole and can be read, so that is all that is wrong with it."""
    path = FILES / "bps_hand_comm_empty.json"
    assert main(["import", "byteps", str(path), "-o", str(tmp_path / "RUN")]) == 2
    assert f"{path}: it holds no events; there is nothing to import" in capsys.readouterr().err


def test_a_cut_file_says_what_is_missing(tmp_path, capsys):
    """The sentence names the file, is printed, and stays with the run."""
    path = tmp_path / "0" / "comm.json"
    path.parent.mkdir()
    path.write_bytes(real(REAL[0])[:100_000])
    run = imported(tmp_path, tmp_path, options=("--start-step", "5"))
    (drain,) = read_summaries(run)

    note = f"{path}: the file ends in the middle of event 278; it is missing, and anything after it"
    assert f"note: {note}\n" in capsys.readouterr().out
    assert note in drain["summary"]["notes"]


def test_a_clock_that_was_set_back_is_kept_and_does_no_harm(tmp_path, capsys):
    """The file comes back as it was; viewers and back ends get no span that ends before it begins."""
    folder = tmp_path / "traces"
    (folder / "0").mkdir(parents=True)
    data = (FILES / "bps_hand_comm_root.json").read_bytes().replace(b'"dur": 24026', b'"dur": -24026')
    (folder / "0" / "comm.json").write_bytes(data)
    run = imported(tmp_path, folder)
    assert "events that end before they begin, because the clock was set back: 1" in capsys.readouterr().out
    for form in ("byteps", "otlp", "chrome"):
        assert main(["export", str(run), "--to", form, "-o", str(tmp_path / form)]) == 0
    spans = [
        span
        for line in (tmp_path / "otlp").read_text().splitlines()
        for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]

    assert (tmp_path / "byteps" / "0" / "comm.json").read_bytes() == data
    assert [span["name"] for span in spans if int(span["endTimeUnixNano"]) < int(span["startTimeUnixNano"])] == []
    assert all(event.get("dur", 0) >= 0 for event in json.loads((tmp_path / "chrome").read_text())["traceEvents"])


def test_links_are_read_under_their_own_names(tmp_path, capsys):
    """A data store keeps files by their content: rank and machine are in the names of the links to them."""
    files, store = unpack("byteps_w1_l2_nodist", tmp_path / "files") / "worker0", tmp_path / "store"
    (folder := tmp_path / "v" / "worker0").mkdir(parents=True)
    store.mkdir()
    for rank, target in enumerate(("bbb2", "aaa1")):
        (files / str(rank)).rename(store / target)
        (store / target / "comm.json").rename(store / f"{target}.json")
        (folder / str(rank)).mkdir()
        (folder / str(rank) / "comm.json").symlink_to(store / f"{target}.json")
    (tmp_path / "v" / "again").symlink_to(folder)
    (folder / "up").symlink_to(tmp_path / "v")
    run = imported(tmp_path, tmp_path / "v", folder / "1" / ".." / "0" / "comm.json")
    out = tmp_path / "out"
    assert main(["export", str(run), "--to", "byteps", "-o", str(out)]) == 0

    binds = [batch.process.bind for batch in read_run(run)]
    assert [(bind.rank, bind.local_rank, bind.node_rank) for bind in binds] == [(0, 0, 0), (1, 1, 0)]
    assert [(out / str(rank) / "comm.json").read_bytes() for rank in range(2)] == [
        (store / f"{target}.json").read_bytes() for target in ("bbb2", "aaa1")
    ]
    assert "its folder is not named" not in capsys.readouterr().out


def test_links_to_folders_are_followed(tmp_path, capsys):
    """Each machine's folder may lie elsewhere; it is called as the link is."""
    files = unpack("byteps_w2_s1", tmp_path / "files")
    (tmp_path / "v").mkdir()
    for link, worker in (("worker0", "worker1"), ("worker1", "worker0")):
        (tmp_path / "v" / link).symlink_to(files / worker)
    imported(tmp_path, tmp_path / "v")

    assert "worker0 is node 0, worker1 is node 1" in capsys.readouterr().out


def test_what_is_a_link_comes_last(tmp_path, capsys):
    """However deep: the folder that it points at has a name of its own, which says whose the files are."""
    unpack("byteps_w2_s1", tmp_path / "v")
    (tmp_path / "v" / "a").mkdir()
    (tmp_path / "v" / "a" / "latest").symlink_to("../worker1")
    imported(tmp_path, tmp_path / "v")

    assert "worker0 is node 0, worker1 is node 1" in capsys.readouterr().out


def test_a_workers_file_of_another_name_in_a_directory_is_told(tmp_path, capsys):
    """It may be a copy, so it is not read; who means it gives it by its name. What else lies there is not told."""
    folder = unpack("byteps_w2_s1", tmp_path / "files") / "worker0" / "0"
    renamed = (folder / "comm.json").with_name("comm-1.json")
    renamed.write_bytes(real(REAL[0]))
    (folder / "notes.json").write_text('{"traceEvents": []}')
    why = f"{renamed} was not read: it is a worker's file, but not called comm.json; to read it too, give it by name\n"
    imported(tmp_path, folder)
    assert [line for line in capsys.readouterr().out.splitlines(keepends=True) if "not read" in line] == [
        f"note: {why}"
    ]

    (folder / "comm.json").unlink()
    assert main(["import", "byteps", str(folder), "-o", str(tmp_path / "ANOTHER")]) == 2
    nothing = f"otel-dltrace: {folder} holds no comm.json, server_profile.json or van profile of BytePS"
    assert capsys.readouterr().err == f"{nothing}; {why}"


def test_a_pipe_is_read(tmp_path, capsys):
    """As from `zcat comm.json.gz`; it can be read but once, and is not looked for elsewhere."""
    pipe, data = tmp_path / "pipe", real(REAL[0])
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True)
    writer.start()
    piped = imported(tmp_path, pipe, options=("--start-step", "5"))
    writer.join()
    assert f"note: {pipe}: its folder is not named after a local rank; it was taken to be 0" in capsys.readouterr().out
    assert main(["export", str(piped), "--to", "byteps", "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "0" / "comm.json").read_bytes() == data


@pytest.mark.parametrize("folder", ["20261123", "20261123143000", "99999999999999999999", "²"])
def test_a_folder_with_the_number_of_a_day_is_no_local_rank(folder, tmp_path, capsys):
    """Two of them are two machines; of folders that are named alike the path is told."""
    data = (FILES / "bps_hand_comm_root.json").read_bytes()
    for machine in ("a", "b"):
        path = tmp_path / machine / folder / "comm.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    run = imported(tmp_path, tmp_path / "a", tmp_path / "b")
    said = capsys.readouterr().out
    assert main(["export", str(run), "--to", "byteps", "-o", str(tmp_path / "out")]) == 0
    assert main(["export", str(run), "--to", "chrome", "-o", str(tmp_path / "t.json")]) == 0

    assert f"{path}: its folder is not named after a local rank; it was taken to be 0" in said
    assert f"{tmp_path}/a/{folder} is node 0, {tmp_path}/b/{folder} is node 1" in said
    assert [(tmp_path / "out" / name / "0" / "comm.json").exists() for name in ("worker0", "worker1")] == [True, True]


def test_what_the_files_do_not_say_is_told(tmp_path, capsys):
    """Which occurrence comes first, which machine, which local rank."""
    for name in ("b10", "b9"):
        path = tmp_path / name / "comm.json"
        path.parent.mkdir()
        path.write_bytes((FILES / "bps_hand_comm_root.json").read_bytes())
    imported(tmp_path, tmp_path)
    said = capsys.readouterr().out

    assert "its folder is not named after a local rank; it was taken to be 0" in said
    assert "b9 is node 0, b10 is node 1" in said
    assert "give it as --start-step" in said


def test_who_is_named_after_a_local_rank_has_it(tmp_path, capsys):
    """Whatever comes before it; what another file is, too, is told."""
    data = (FILES / "bps_hand_comm_root.json").read_text()
    folders = {"0": "0", "00": "2", "1": "1", ".": "3"}
    contents = {}
    for number, (name, local) in enumerate(folders.items()):
        (tmp_path / "w" / name).mkdir(parents=True, exist_ok=True)
        contents[local] = data.replace('"dur": 24026', f'"dur": {number}')
        (tmp_path / "w" / name / "comm.json").write_text(contents[local])
    paths = [tmp_path / "w" / name / "comm.json" for name in folders]
    run = imported(tmp_path, *paths)
    assert main(["export", str(run), "--to", "byteps", "-o", str(tmp_path / "out")]) == 0

    said = capsys.readouterr().out
    assert {path.parent.name: path.read_text() for path in (tmp_path / "out").rglob("comm.json")} == contents
    assert f"{paths[1]}: {paths[0]} is of local rank 0 as well; it was taken to be 2" in said
    assert f"{paths[3]}: its folder is not named after a local rank; it was taken to be 3" in said


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        (["nowhere"], "nowhere: No such file or directory"),
        (["."], "holds no comm.json, server_profile.json or van profile of BytePS"),
    ],
)
def test_what_cannot_be_imported_is_refused(paths, error, tmp_path, capsys, monkeypatch):
    """With exit code 2, one sentence, and nothing left behind."""
    monkeypatch.chdir(tmp_path)

    assert main(["import", "byteps", *paths, "-o", "RUN"]) == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--start-step", "--servers"])
@pytest.mark.parametrize("text", ["x", "", "0", "-3", "1.5", "2147483648"])
def test_a_number_that_is_none_is_refused(option, text, tmp_path, capsys):
    """In a sentence, before anything is read."""
    with pytest.raises(SystemExit, match="2"):
        main(["import", "byteps", str(tmp_path), "-o", str(tmp_path / "RUN"), f"{option}={text}"])

    said = f"otel-dltrace: {option}: {text!r} is not a whole number from 1 to 2,147,483,647: write 10, for example; "
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("option", ["--start-step", "--servers"])
def test_an_option_of_byteps_s_is_refused_beside_another_format(option, tmp_path, capsys):
    """It would be left aside without a word."""
    files = unpack("byteps_w2_s1", tmp_path / "files")

    assert main(["import", "horovod", str(files), "-o", str(tmp_path / "RUN"), option, "3"]) == 2
    assert capsys.readouterr().err == f"otel-dltrace: {option} is for byteps, and not for horovod: leave it out\n"
    assert not (tmp_path / "RUN").exists()


def test_the_largest_start_step_is_taken(tmp_path):
    """Occurrences and steps after it are counted on."""
    files = unpack("byteps_w2_s1", tmp_path / "files")
    run = imported(tmp_path, files, options=("--start-step", "2147483647"))

    assert sorted(set(read_run(run)[0]["step"].tolist())) == [*range(2147483646, 2147483657)]


def test_an_import_never_adds_to_a_run(two_workers, capsys):
    """What is there stays as it is."""
    assert main(["import", "byteps", str(FILES / "bps_hand_comm_root.json"), "-o", str(two_workers)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert len(read_run(two_workers)) == 2


@pytest.mark.parametrize(
    ("options", "times"),
    [
        pytest.param([], [*range(11)], id="all"),
        pytest.param(["--completions", "6-7"], [1, 2], id="completions"),
        pytest.param(["--steps", "5-5"], [1], id="steps"),
    ],
)
def test_part_of_a_timeline_is_exported(two_workers, options, times, tmp_path, monkeypatch):
    """Completions count from 1, as BytePS does, steps from 0; the folder has a name unless it is given one."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(two_workers), "--to", "byteps", *options]) == 0

    def begins(path):
        found = defaultdict(list)
        for event in json.loads(path.read_text())["traceEvents"]:
            found[event["name"], event["tid"]].append(event["ts"])
        return {series: sorted(times) for series, times in found.items()}

    (original, _) = sorted((tmp_path / "files").rglob("comm.json"))
    assert begins(tmp_path / "traces" / "worker0" / "0" / "comm.json") == {
        series: [at[nth] for nth in times] for series, at in begins(original).items()
    }


def test_a_directory_keeps_what_an_export_does_not_write(two_workers, tmp_path, capsys, monkeypatch):
    """A timeline that is none of this run is left, and said."""
    monkeypatch.chdir(tmp_path)  # which what is written is named from, where that is shorter
    out = tmp_path / "out"
    older = out / "worker2" / "0" / "comm.json"
    older.parent.mkdir(parents=True)
    older.write_text("old")
    capsys.readouterr()

    assert main(["export", str(two_workers), "--to", "byteps", "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("out/worker0/0/comm.json, out/worker1/0/comm.json: 1,848 events, ")
    assert told.err == "otel-dltrace: out/worker2/0/comm.json is from an earlier export, and not part of this one\n"
    assert older.read_text() == "old"


def test_completions_that_are_none_are_refused(two_workers, capsys):
    """In the command's own words."""
    assert main(["export", str(two_workers), "--to", "byteps", "--completions", "0-3"]) == 2
    assert "--completions '0-3' is not a range; write A-B, from 1, or all" in capsys.readouterr().err
    assert main(["export", str(two_workers), "--to", "chrome", "--completions", "1-3"]) == 2
    assert "--completions is for --to byteps; --steps chooses what chrome has" in capsys.readouterr().err


def test_completions_that_a_run_lacks_are_told_from_no_push_pulls_at_all(two_workers, tmp_path, capsys):
    """The sentence says which the tensors have, whoever asked for others: the option, or the traced run's variables."""
    to = ["export", str(two_workers), "--to", "byteps", "-o", str(tmp_path / "out")]
    lacking = "none of the completions asked for is in this run; its tensors have 5 to 15: give --completions\n"
    capsys.readouterr()

    assert main([*to, "--completions", "1-4"]) == 2
    assert capsys.readouterr().err == f"otel-dltrace: {lacking}"
    for summary in two_workers.rglob("drain.json"):
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"comm_steps": "100-200"}))
    assert main(to) == 2
    assert capsys.readouterr().err == f"otel-dltrace: {lacking}"
    assert main([*to, "--completions", "15-100"]) == 0


def test_runs_that_were_traced_for_different_completions_are_not_mixed(two_workers, tmp_path, capsys):
    """Each run's are named; one that was traced for none in particular has all."""
    other = shutil.copytree(two_workers, tmp_path / "other")
    for summary in other.rglob("drain.json"):
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"comm_steps": "10-20"}))
    capsys.readouterr()

    assert main(["export", str(two_workers), str(other), "--to", "byteps", "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "otel-dltrace: the runs were traced for different completions (10-20, all); give --completions\n"
    )


@pytest.mark.parametrize(
    ("form", "file", "more", "told"),
    [
        pytest.param("byteps", "pslite_hand_van_server.txt", (), "no push_pull", id="no push_pull"),
        pytest.param("byteps-server", "bps_hand_comm_root.json", (), "no push or pull", id="no server"),
        pytest.param("byteps-server", "bps_hand_comm_root.json", ("--servers", "1"), "no push or pull", id="server"),
    ],
)
def test_a_run_without_push_pulls_is_no_timeline(form, file, more, told, tmp_path, capsys):
    """Nothing is written for what BytePS's files cannot hold, and no level is advised that was the run's."""
    run = imported(tmp_path, FILES / file, options=more)

    assert main(["export", str(run), "--to", form, "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "level" not in said
    assert not (tmp_path / "out").exists()


def test_a_gzipped_file_is_refused_with_what_to_do(tmp_path, capsys):
    """It was read as JSON, and its bytes stood in the message."""
    packed = tmp_path / "comm.json.gz"
    packed.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert main(["import", "byteps", str(packed), "-o", str(tmp_path / "RUN")]) == 2
    assert f"{packed} is gzipped; give the output of `zcat`" in capsys.readouterr().err
    assert not (tmp_path / "RUN").exists()


def test_a_folder_s_gzipped_file_is_found(tmp_path, capsys):
    """One that was packed is said to be; a copy beside the file itself is none more."""
    plain, packed = tmp_path / "0" / "comm.json", tmp_path / "0" / "comm.json.gz"
    plain.parent.mkdir()
    packed.write_bytes(gzip.compress((FILES / "bps_hand_comm_root.json").read_bytes()))
    assert main(["import", "byteps", str(tmp_path), "-o", str(tmp_path / "RUN")]) == 2
    assert f"{packed} is gzipped; give the output of `zcat`" in capsys.readouterr().err

    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert main(["import", "byteps", str(tmp_path), "-o", str(tmp_path / "RUN")]) == 0
    assert "from 1 file" in capsys.readouterr().out
