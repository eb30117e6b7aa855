"""`otel-dltrace recover`: what nobody drained, and what waits on disk for a collector, each where its own run says."""

import errno
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_dltrace.cli.main import main
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.files import read_object, write_json_again
from otel_dltrace.export.otlp.spill import Spill
from otel_dltrace.export.rings import folder as ring_folder
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rundir.damage import damage_of
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.model.summary import summary_line
from tests.support import servers
from tests.support.processes import LONG_S, nobody, waiting
from tests.support.told import Told, http_server

KILLED = """
    import os, signal
    import otel_dltrace as d
    d.start()
    for i in range(2):
        with d.step(i):
            pass
    os.kill(os.getpid(), signal.SIGKILL)
"""
CUT_OFF = """
    import os, signal
    import otel_dltrace as d
    d.start()
    for i in range(2):
        with d.step(i):
            if i:
                AGAIN
                os.kill(os.getpid(), signal.SIGKILL)
"""
BOUND_AGAIN = "from otel_dltrace.record.tracer import live; own = live.tracer.recorder; own.bind(own.bound, i)"
KILLED_BEFORE_IT_COUNTS = """
    import os
    from otel_dltrace.cli.main import main
    from otel_dltrace.export.run_folders import RunFolders
    RunFolders.count = lambda *_, **__: os._exit(9)
    main(["recover"])
"""
STEPS = """
    import otel_dltrace as d
    d.start()
    for i in range(3):
        with d.step(i):
            pass
"""
STAYING = f"""{STEPS}
    import time
    from pathlib import Path
    print("written", flush=True)
    while not Path("over").exists():
        time.sleep(0.01)
"""
READ = f"""{STEPS}
    import time
    print(d.flush({LONG_S}), flush=True)
    time.sleep({LONG_S})
"""
ON = {"OTEL_DLTRACE": "1", "RANK": "0", "WORLD_SIZE": "1", "OTEL_DLTRACE_STEPS": "all", "OTEL_DLTRACE_METRICS": "0"}


@pytest.mark.parametrize(
    ("env", "why"),
    [
        pytest.param({}, "OTEL_EXPORTER_OTLP_ENDPOINT is not set", id="no endpoint"),
        pytest.param(
            {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
            "OTEL_TRACES_EXPORTER=none leaves otlp out",
            id="not over OTLP",
        ),
    ],
)
def test_spans_that_are_recovered_and_not_sent_are_said_to_be(place, env, why):
    """Their rings are gone then; the second time there is nothing to say of it."""
    place.run(KILLED, **ON, OTEL_DLTRACE_DRAIN="off")
    first, second = (place.command("recover", **env) for _ in range(2))

    (run,) = place.runs()
    assert (first.returncode, first.stdout) == (
        0,
        f"{run.name}: 2 spans recovered, 0 of them open\n"
        f"nothing was sent: {why}; `otel-dltrace export RUN --to otlp` writes the spans for a collector\n",
    )
    assert second.stdout == f"no ring in {place.rings} has lost both its writer and its drain\n"


@pytest.mark.parametrize("content", [None, b"torn"], ids=["a link to itself", "no ring"])
def test_a_ring_that_cannot_be_read_is_told(place, content):
    """It stays, and whatever it holds is not recovered; the others are."""
    ring = place.rings / f"{1:016x}.ring"
    ring.symlink_to(ring) if content is None else ring.write_bytes(content)
    alone = place.command("recover")
    place.run(KILLED, **ON, OTEL_DLTRACE_DRAIN="off")
    beside = place.command("recover")

    why = f"{ring} cannot be read: [Errno 40]" if content is None else "4 bytes are too short for a ring\n"
    said = f"otel_dltrace: {ring} is not a ring that can be read, and stays where it is: {why}"
    assert (alone.returncode, alone.stdout, alone.stderr.startswith(said)) == (0, "", True)
    assert (beside.returncode, beside.stderr) == (0, alone.stderr)
    assert beside.stdout.startswith(f"{place.runs()[0].name}: 2 spans recovered, 0 of them open\n")


@pytest.mark.parametrize("again", [pytest.param("pass", id="bound once"), pytest.param(BOUND_AGAIN, id="twice")])
def test_what_was_cut_off_is_counted_by_the_drain_after_a_killed_one(place, again):
    """It had closed and written them, and nothing is left to be closed; it was told as 0 open."""
    place.run(CUT_OFF.replace("AGAIN", again), **ON, OTEL_DLTRACE_DRAIN="off")
    killed = place.run(KILLED_BEFORE_IT_COUNTS)
    done = place.command("recover")

    (run,) = place.runs()
    told = done.stdout.splitlines()[0]
    assert (killed.returncode, told) == (9, f"{run.name}: 2 spans recovered, 1 of them open")


def test_spans_are_recovered_to_where_the_environment_says_now(place, tmp_path):
    """Whatever the run's own said."""
    place.run(KILLED, **ON, OTEL_DLTRACE_DRAIN="off", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    with servers.collector(tmp_path) as collector:
        done = place.command("recover", **ON, OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)
        collector.wait_for(4)

    # What takes longer than a second and a half is sent from the disk, as a second line then says.
    assert done.stdout.splitlines()[0] == f"{place.runs()[0].name}: 2 spans recovered, 0 of them open"


def spilled(run: Path) -> int:
    """Return how many spans of *run* wait on disk, as the names of the files say."""
    return sum(int(path.stem.rpartition("-")[2]) for path in run.glob("hosts/*/spill/*.otlp"))


def test_what_several_drains_of_a_host_left_is_finished_where_each_was(place):
    """As of ranks that are killed where each drains itself: their last steps, too, were still to be sent."""
    told = Told((200, {}, b""))
    with http_server(told) as endpoint:
        env = {**ON, "WORLD_SIZE": "2", "OTEL_DLTRACE_JOB": "one", "OTEL_DLTRACE_RUN": "one"}
        env["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"{endpoint}/v1/traces"
        ranks = [place.start(READ, **{**env, "OTEL_DLTRACE_DRAIN": "thread", "RANK": str(rank)}) for rank in range(2)]
        assert [rank.stdout.readline() for rank in ranks] == ["True\n"] * 2
        for rank in ranks:
            rank.kill()
            rank.communicate()
        done = place.command("recover", **env)

    (run,) = place.runs()
    drains = [(drain["summary"].get("spans"), drain["ended"]) for drain in read_summaries(run)]
    requests = map(ExportTraceServiceRequest.FromString, told.bodies)
    spans = {s.span_id for r in requests for of in r.resource_spans for scope in of.scope_spans for s in scope.spans}
    assert (done.returncode, drains, sorted((batch.rank, len(batch)) for batch in read_run(run)), len(spans)) == (
        (0, [(3, True)] * 2, [(0, 3), (1, 3)], 3 + 3 + 3)
    )


class StuckFirst(set[Path]):
    """Rings in their order, as a set may have them by chance."""

    def difference(self, *others):
        """Return them in the order of their names."""
        return sorted(super().difference(*others))


@pytest.mark.parametrize(
    "error", [pytest.param(PermissionError(errno.EPERM, "no"), id="said"), pytest.param(None, id="in silence")]
)
def test_a_ring_that_has_to_stay_keeps_no_other_from_being_recovered(place, capsys, monkeypatch, error):
    """Each drain had it go on again in place of those that it postponed, and the command gave up in silence."""
    env = {**ON, "WORLD_SIZE": "3", "OTEL_DLTRACE_JOB": "one", "OTEL_DLTRACE_RUN": "one"}
    ranks = [place.start(READ, **{**env, "OTEL_DLTRACE_DRAIN": "thread", "RANK": str(rank)}) for rank in range(3)]
    assert [rank.stdout.readline() for rank in ranks] == ["True\n"] * 3
    for rank in ranks:
        rank.kill()
        rank.communicate()
    stuck, *_ = sorted(place.rings.glob("*.ring"))
    found, remove = ring_folder._rings_in, RingSource.remove

    def staying(source):
        if source.path != stuck:
            remove(source)
        elif error:
            raise error

    monkeypatch.setattr(RingSource, "remove", staying)
    monkeypatch.setattr(ring_folder, "_rings_in", lambda folder: StuckFirst(found(folder)))
    for name, value in {**env, "OTEL_DLTRACE_DIR": place.folder, "OTEL_DLTRACE_RING_DIR": place.rings}.items():
        monkeypatch.setenv(name, str(value))
    code = main(["recover"])

    (run,) = place.runs()
    said, drains = capsys.readouterr(), [(of["summary"].get("spans"), of["ended"]) for of in read_summaries(run)]
    assert (
        code,
        drains,
        said.out.splitlines()[0],
        said.err.count("cannot be removed"),
        [*place.rings.glob("*.ring")],
    ) == ((0, [(3, True)] * 3, f"{short_path(run)}: 9 spans recovered, 0 of them open", int(bool(error)), [stuck]))


def test_what_waits_for_the_collector_is_in_its_own_run(place, tmp_path):
    """Two jobs have one drain: who removes the first, or recovers the second alone, loses nothing of the second."""
    away = {**ON, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{servers.free_port()}"}
    jobs, drains = [], []
    for _ in range(2):
        jobs.append(place.start(STAYING, **away))
        assert jobs[-1].stdout.readline() == "written\n"
        drains += servers.wait_until(place.drains, what="the drain")
    (place.folder / "over").touch()
    assert [place.finish(job).returncode for job in jobs] == [0, 0]
    place.wait_for_rings()
    drains[0].terminate()
    place.wait_for_drains()
    first, second = place.runs()
    waiting = [spilled(run) for run in (first, second)]
    shutil.rmtree(first)
    with servers.collector(tmp_path) as collector:
        done = place.command("recover", str(second), OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)
        received = {span.span_id for span in collector.wait_for(6)}

    assert drains == [drains[0]] * 2
    assert waiting == [6, 6]
    assert "6 spans sent, 0 still waiting" in done.stdout
    assert {int(i).to_bytes(8, "big") for batch in place.spans() for i in batch["span_id"]} < received


def test_what_waits_of_any_run_is_sent_by_a_recover_that_names_none(place, tmp_path):
    """In the folder where run directories are made; without an endpoint it is told to wait there still."""
    away = {**ON, "OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    place.run(STEPS, **away)
    place.wait_for_drains()
    (spill,) = place.folder.glob("dltrace-*/hosts/*/spill")
    kept = place.command("recover")
    with servers.collector(tmp_path) as collector:
        done = place.command("recover", OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)

    told, where = f"no ring in {place.rings} has lost both its writer and its drain\n", spill.relative_to(place.folder)
    assert [(it.returncode, it.stdout) for it in (kept, done)] == [
        (0, f"{told}requests wait in {where} and are not sent: OTEL_EXPORTER_OTLP_ENDPOINT is not set\n"),
        (0, f"{told}{where}: 6 spans sent, 0 still waiting\n"),
    ]


def test_a_run_directory_that_cannot_be_made_keeps_no_others_from_being_sent(place):
    """One sentence is said of it, by the drain: nobody gave a run that is none."""
    away = {**ON, "OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    place.run(STEPS, **away)
    place.wait_for_drains()
    (spill,) = place.folder.glob("dltrace-*/hosts/*/spill")
    gone = place.folder / "gone"
    gone.mkdir()
    place.run(STEPS, **ON, OTEL_DLTRACE_DIR=gone, OTEL_DLTRACE_DRAIN="off")
    gone.rmdir()
    gone.touch()
    told = Told((200, {}, b""))
    with http_server(told) as endpoint:
        done = place.command("recover", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_METRICS_EXPORTER="none")

    (ring,) = place.rings.glob("*.ring")
    assert f"otel_dltrace: {ring} cannot be emptied into its run directory (" in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert f"{spill.relative_to(place.folder)}: 6 spans sent, 0 still waiting" in done.stdout


def test_what_was_sent_later_is_no_longer_said_to_wait(place, tmp_path):
    """By `doctor` and `open`; once everything is there nothing is to be done."""
    env = {**ON, "OTEL_METRICS_EXPORTER": "none"}
    place.run(STEPS, **env, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{servers.free_port()}")
    place.wait_for_drains()
    (run,) = place.runs()
    (told,) = run.glob("hosts/*/drain.json")
    written = told.stat().st_mtime_ns
    waited = place.command("open", str(run), "--step", "0").stderr
    with servers.collector(tmp_path) as collector:
        place.command("recover", str(run), OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)

    assert "nothing from" in waited
    assert summary_line(json.loads(told.read_text())["summary"]) == "3 spans recorded, 6 sent, none waiting, none lost"
    assert place.command("open", str(run), "--step", "0").stderr == ""
    assert told.stat().st_mtime_ns == written


def test_what_waits_of_another_user_is_not_sent(capsys, monkeypatch):
    """Its drain may be at work, and nothing that was sent could be removed: each time it would be sent again."""
    told = Told((200, {}, b""))
    with TemporaryDirectory() as folder, http_server(told) as endpoint:
        Path(folder).chmod(0o755)
        spill = Path(folder, "run", "hosts", "node-0", "spill")
        mine = Path(folder, "run", "hosts", "node-1", "spill")
        for waiting in (spill, mine):
            Spill(waiting).put(b"x", 1)
        for path in (mine, mine.parent):
            path.chmod(0o777)
        (spill.parent / ".lock").touch(mode=0o600)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        for variable, name in (("OTEL_DLTRACE_DIR", "mine"), ("OTEL_DLTRACE_RING_DIR", "rings")):
            monkeypatch.setenv(variable, f"{folder}/{name}")
            Path(folder, name).mkdir()
            Path(folder, name).chmod(0o777)
        main(["recover"])  # as nobody we may not read our own modules
        capsys.readouterr()
        with nobody():
            code = main(["recover", f"{folder}/run"])

    said = (
        f"otel-dltrace: {short_path(spill)} is not writable for you; whoever wrote the run can send what waits there\n"
    )
    assert (code, capsys.readouterr().err, len(told.bodies)) == (2, said, 1)  # that of the other host


def test_links_in_a_run_lead_nowhere(tmp_path, monkeypatch, capsys):
    """Who made a run may have put some there: what they lead to is neither sent, nor written to, nor made."""
    secret, made = tmp_path / "secret", tmp_path / "made"
    secret.write_text("mine")
    folder = tmp_path / "run" / "hosts" / "node-0"
    (folder / "spill").mkdir(parents=True)
    (folder / "spill" / "00000001-0003.otlp").symlink_to(secret)
    (folder / ".lock").symlink_to(made)
    (folder / ".drain.json.room").symlink_to(secret)
    told = Told((200, {}, b""))
    with http_server(told) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_DLTRACE_RING_DIR", str(tmp_path))
        assert main(["recover", str(folder.parents[1])]) == 0
    write_json_again(folder / "drain.json", {"schema": 1})

    assert told.bodies == []
    assert capsys.readouterr().out.endswith("spill: 0 spans sent, 0 still waiting\n")
    assert (secret.read_text(), made.exists(), read_object(folder / "drain.json")) == ("mine", False, {"schema": 1})
    assert (folder / "spill" / "00000001-0003.otlp").is_symlink()


def test_a_run_whose_drain_was_killed_when_all_was_read_has_ended(place):
    """No ring is left by which anybody would come to it, and its report said for ever that more may come."""
    place.run(waiting(STEPS), **ON)
    (run,) = place.runs()
    for drain in place.drains():
        drain.kill()
    place.wait_for_drains()
    before = place.command("report", str(run)).stdout
    done = place.command("recover", str(run))
    after = place.command("report", str(run)).stdout

    (folder,) = run.glob("hosts/*")
    assert "`otel-dltrace recover RUN` finishes the work" in " ".join(before.split())
    assert done.stdout.splitlines()[1:] == [
        f"{folder.relative_to(place.folder)}: its drain is gone and had read everything, so nothing more will come"
    ]
    assert "more may come" not in after
    (segment,) = folder.glob("spans-*.arrows")
    segment.unlink()
    assert damage_of(run) == [f"{segment.relative_to(run)} is missing: it was there at the run's end"]


@pytest.mark.parametrize(("boot", "left"), [("ab" * 16, True), ("", False)], ids=["another host's", "this one's"])
def test_what_a_host_that_is_gone_had_not_read_is_told(place, boot, left):
    """Here are none of its rings: where they are, if they are, is all that can be said."""
    place.run(waiting(STEPS), **ON)
    (run,) = place.runs()
    place.wait_for_drains()
    (folder,) = run.glob("hosts/*")
    told = read_object(folder / "drain.json")
    told["processes"][0] |= {"host": "node-7"} | ({"boot_id": boot} if boot else {})
    write_json_again(folder / "drain.json", {**told, "ended": False, "summary": {"processes": 0}})
    done = place.command("recover", str(run))

    said = (
        f"{folder.relative_to(place.folder)}: its drain is gone, and the rings of 1 process were not read to their "
        "end: `otel-dltrace recover` on node-7 reads them, unless that host has been restarted since"
    )
    assert done.stdout.splitlines()[1:] == [said] * left


def test_what_waits_of_a_run_that_goes_on_is_left_to_its_drain(place):
    """It would miss what another process sends, and say that it was lost."""
    away = {**ON, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{servers.free_port()}"}
    job = place.start(STAYING, **away, OTEL_BSP_SCHEDULE_DELAY="50")
    servers.wait_until(lambda: any(map(spilled, place.runs())), what="requests on disk")
    (run,) = place.runs()
    done = place.command("recover", str(run), **away)
    (place.folder / "over").touch()
    place.finish(job)

    assert done.stdout.splitlines()[1:] == [
        f"{folder.relative_to(place.folder)}: the drain that writes there is running, and sends what waits itself"
        for folder in run.glob("hosts/*/spill")
    ]


def test_nothing_stays_among_the_rings_of_a_drain_that_was_killed_with_its_program(place):
    """Its bell would stay until the next start, and a job of another name has another."""
    program = place.start(STAYING)
    servers.wait_until(lambda: any(bell.is_fifo() for bell in place.rings.glob("*.bell")), what="the drain's bell")
    for process in (*place.drains(), program):
        process.kill()
        process.wait()

    assert "3 spans recovered" in place.command("recover").stdout
    assert list(place.rings.iterdir()) == []
