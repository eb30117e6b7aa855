"""Several drains beside one another: each span is written once, and goes where its own program said."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.export.drain import Drain
from otel_dltrace.export.rings import folder as ring_folder
from otel_dltrace.export.rundir.delivered import Delivered, with_earlier
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.semconv import Flag
from otel_dltrace.record.launch import ALL_RINGS
from otel_dltrace.record.names import Names
from otel_dltrace.record.ring_file import take_for_reading
from tests.support import servers
from tests.support.processes import Place, waiting
from tests.support.servers import collector, free_port

STEPS = """
    import otel_dltrace as d
    d.start()
    for i in range(3):
        with d.step(i), d.phase("rollout"):
            pass
"""
ON = {"OTEL_DLTRACE": "1", "RANK": "0", "WORLD_SIZE": "1", "OTEL_DLTRACE_STEPS": "all"}
OPEN_END = """
    import otel_dltrace as d, sys
    d.start()
    with d.step(0), d.phase("rollout"):
        pass
    print("written", flush=True)
    sys.stdin.read()
"""


def sent_by(drain: Drain) -> int:
    """Return how many spans *drain* has written."""
    return sum(member.written for follower in drain.followers.values() for member in follower.members)


def test_a_ring_is_read_by_one_drain_at_a_time(place: Place) -> None:
    """Here one that serves all rings, beside the one that the program has started."""
    child = subprocess.Popen(
        [sys.executable, str(place.write(OPEN_END))],
        cwd=place.folder,
        env=place.env(**ON, OTEL_BSP_SCHEDULE_DELAY="100"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    place.children.append(child)
    assert child.stdout is not None
    child.stdout.readline()
    servers.wait_until(lambda: list(place.folder.glob(".dltrace-*.partial")), what="the program's own drain")
    other = Drain(Serving(place.rings, place.folder, linger=0.0))
    for _ in range(5):
        other.tick()
    child.communicate("", timeout=240)
    place.wait_for_rings()

    assert sent_by(other) == 0
    assert sum(map(len, place.spans())) == 2


BURSTS = """
    import resource, time
    import otel_dltrace as d
    d.start()

    def burst():
        time.sleep(1.1)  # a drain is looked for again, at a record that needs a new chunk
        for _ in range(100):
            with d.phase("rollout"):
                pass
"""
SHORT_OF_FILES = f"""{BURSTS}
    with d.step():
        burst()
        d.flush(60)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        burst()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for _ in range(3):
            burst()
"""
FOUR_BURSTS = f"""{BURSTS}
    with d.step():
        for _ in range(4):
            burst()
"""


def kinds(place: Place) -> list[tuple[str, int, int]]:
    """Return of each process's spans the kinds: name, how many, how many of these were cut off."""
    found = []
    for batch in place.spans():
        for name in ("rank.step", "rollout"):
            rows = batch.rows[batch.lookup(lambda d, name=name: d.name == name, bool)]
            found.append((name, len(rows), int(np.count_nonzero(rows["flags"] & Flag.TRUNCATED))))
    return found


def test_a_program_that_has_no_descriptor_for_a_while_is_traced_to_its_end(place: Place) -> None:
    """Its drain goes on: no thread is begun beside it, which would have ended the trace in silence."""
    done = place.run(SHORT_OF_FILES, **ON)
    place.wait_for_rings()

    assert kinds(place) == [("rank.step", 1, 0), ("rollout", 500, 0)]
    assert "no drain is looked for (Too many open files); that is tried again" in done.stderr
    assert "a thread drains" not in done.stderr


def test_a_thread_that_cannot_begin_leaves_the_ring_to_another_drain(place: Place) -> None:
    """Here of a damaged certificate; it is tried again each second, and the other one goes on."""
    damaged = place.write("no certificate", "ca.pem")
    otlp = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://127.0.0.1:1", "OTEL_EXPORTER_OTLP_CERTIFICATE": str(damaged)}
    program = place.start(FOUR_BURSTS, **ON, **otlp, OTEL_DLTRACE_DRAIN="thread")
    other = Drain(Serving(place.rings, place.folder, linger=0.0, delay=0.0))
    while program.poll() is None and not other.followers:
        other.tick()
        time.sleep(0.02)
    was_read_meanwhile = program.poll() is None
    other.run()

    assert was_read_meanwhile
    assert place.finish(program).returncode == 0
    assert kinds(place) == [("rank.step", 1, 0), ("rollout", 400, 0)]


@pytest.mark.parametrize("mode", ["thread", "off"])
def test_run_drains_whatever_the_program_would_have_done(place: Place, mode: str) -> None:
    """`run` has a drain: a thread in the program besides would send each span twice."""
    program = str(place.write(STEPS))
    done = place.command("run", "--no-report", "--", sys.executable, program, **ON, OTEL_DLTRACE_DRAIN=mode)

    assert done.returncode == 0
    assert "6 spans recorded" in done.stderr
    assert sum(map(len, place.spans())) == 6


@pytest.mark.parametrize(
    ("folder", "env"),
    [
        pytest.param("", {}, id="here"),
        pytest.param("runs", {"OTEL_DLTRACE_DIR": "runs"}, id="a folder"),
        pytest.param("", {"OTEL_DLTRACE_RING_DIR": "rings"}, id="rings, too"),
    ],
)
def test_run_drains_a_program_that_its_script_starts_elsewhere(place: Place, folder: str, env: dict[str, str]) -> None:
    """A script that changes its directory first: the run is where `run` was, which reports on it."""
    place.write(STEPS)
    (place.folder / "source").mkdir()
    script = ["sh", "-c", 'cd source && exec "$0" ../program.py', sys.executable]
    done = place.command("run", "--no-report", "--", *script, **ON | env)

    (run,) = place.folder.joinpath(folder).glob("dltrace-*")
    assert done.stderr == f"otel-dltrace: 6 spans recorded, none lost; in {run.relative_to(place.folder)}\n"
    assert list(place.folder.glob("source/*")) == []


def test_run_says_where_the_spans_of_a_script_with_its_own_settings_are(place: Place) -> None:
    """They may go elsewhere, by a drain of their own, of which `run` does not know when it is done."""
    place.write(waiting(STEPS))
    script = ["sh", "-c", 'OTEL_DLTRACE_STEPS=first=1 exec "$0" program.py', sys.executable]
    done = place.command("run", "--", *script, **ON)

    (run,) = place.runs()
    said = f"nothing was traced with our settings; with other settings, meanwhile: {run.name}"
    assert done.stderr.splitlines()[-1] == f"otel-dltrace: {said}"


def test_a_second_job_sends_where_it_says_itself(place: Place) -> None:
    """The drain of a first one, without a collector, may still be there: it lingers for five seconds."""
    first = place.run(STEPS, **ON)
    with collector(place.folder) as there:
        second = place.run(STEPS, **ON, OTEL_EXPORTER_OTLP_ENDPOINT=there.http)
        received = there.wait_for(9)
    third = place.run(STEPS, **ON)

    assert [done.returncode for done in (first, second, third)] == [0, 0, 0]
    assert len({span.span_id for span in received}) == len(received) == 9  # each step has a root
    assert "sent" not in first.stderr + third.stderr


def test_a_drain_tells_each_run_what_was_sent_of_it(place: Place) -> None:
    """Three in a row have one, which lingers: its figures go on, those of a run do not."""
    with collector(place.folder) as there:
        env = {**ON, "OTEL_EXPORTER_OTLP_ENDPOINT": there.http}
        told = [place.run(waiting(STEPS), **env).stderr for _ in range(3)]
        there.wait_for(27)
    place.wait_for_rings()

    sent = [summary["summary"]["otlp"]["sent"] for run in place.runs() for summary in read_summaries(run)]
    assert [("9 sent" in line) for line in told] == [True] * 3, told
    assert sent == [9, 9, 9]


def test_a_drain_tells_each_run_what_waits_of_it(place: Place) -> None:
    """Also where the collector is away, and the spans of the run before wait on the same drain."""
    env = {**ON, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    told = [place.run(waiting(STEPS), **env).stderr for _ in range(3)]
    place.wait_for_rings()
    place.wait_for_drains()

    left = [summary["summary"]["otlp"] for run in place.runs() for summary in read_summaries(run)]
    assert [(" 9 waiting" in line) for line in told] == [True] * 3, told
    assert [otlp["waiting"] + otlp["spilled"] for otlp in left] == [9, 9, 9]


def test_what_waits_is_no_count() -> None:
    """A run that begins while spans of the one before are on their way is told what waits when it ends."""
    now = {"otlp": {"sent": 50, "waiting": 40}, "trouble": ["none"]}
    delivered = Delivered(lambda _: copy.deepcopy(now))
    delivered.begin(Path("second"))
    now["otlp"] = {"sent": 120, "waiting": 3}

    assert delivered.of(Path("second")) == {"otlp": {"sent": 70, "waiting": 3}, "trouble": ["none"]}


@pytest.mark.parametrize("waits", [0, 9])
def test_figures_say_that_what_an_earlier_run_had_left_may_be_among_them(waits: int) -> None:
    """It is delivered while the next one goes on; its own figures are no less its own."""
    now = {"accepted": 0, "spilled": 0}
    delivered = Delivered(lambda run: {"otlp": now | ({} if run == Path("first") else {"spilled": 0})})
    delivered.begin(Path("first"))
    now["spilled"] = waits
    delivered.end(Path("first"))
    delivered.begin(Path("second"))
    now |= {"accepted": waits + 4, "spilled": 0}

    told = [delivered.of(Path(run))["otlp"] for run in ("first", "second")]
    both = {"shared": True} if waits else {}
    assert told == [{"accepted": waits, "spilled": 0}, {"accepted": waits + 4, "spilled": 0} | both]


def test_figures_of_runs_at_once_say_that_they_are_of_both() -> None:
    """A run that comes when the others are over has its own alone."""
    delivered = Delivered(lambda _: {"otlp": {"accepted": 9, "warning": "2 are too old"}})
    runs = [*map(Path, ("first", "second", "third"))]
    for run in runs[:2]:
        delivered.begin(run)
    for run in runs[:2]:
        delivered.end(run)
    delivered.begin(runs[2])

    told = {"accepted": 0, "warning": "2 are too old"}
    assert [delivered.of(run)["otlp"] for run in runs] == [told | {"shared": True}, told | {"shared": True}, told]


@pytest.mark.parametrize(
    ("before", "now", "shared"),
    [
        pytest.param({"shared": True}, {"shared": True}, {"shared": True}, id="both"),
        pytest.param({"shared": True}, {}, {"shared": True}, id="an earlier drain's"),
        pytest.param({}, {"shared": True}, {"shared": True}, id="this drain's"),
        pytest.param({}, {}, {}, id="none"),
    ],
)
def test_that_figures_are_of_both_hides_no_warning(before: dict, now: dict, shared: dict) -> None:
    """What the collector said to an earlier drain of the run stays, till it says something else."""
    told = with_earlier({"accepted": 4, "warning": "2 are too old"} | before, {"accepted": 5, "warning": ""} | now)
    assert told == {"accepted": 9, "warning": "2 are too old"} | shared


def test_what_waited_at_a_run_s_end_and_was_delivered_is_its_own() -> None:
    """While the drain lingers, that is; once another run begins the first one's figures stand, as where both go on."""
    now = {"accepted": 0, "spilled": 0}
    delivered, (first, second, third) = Delivered(lambda _: dict(now)), map(Path, ("first", "second", "third"))
    delivered.begin(first)
    now["spilled"] = 9
    delivered.end(first)
    now |= {"accepted": 9, "spilled": 0}
    told = [delivered.of(first)]
    for run in (second, third):
        delivered.begin(run)
    now["accepted"] = 20
    delivered.end(second)
    now["accepted"] = 50

    told += [delivered.of(run) for run in (first, second, third)]
    assert told == [{"accepted": count, "spilled": 0} for count in (9, 9, 11, 41)]


@pytest.mark.parametrize(("sent", "told"), [(9, 9), (0, 0)], ids=["sent", "given up"])
def test_what_waited_at_a_run_s_end_does_not_wait_for_ever(sent: int, told: int) -> None:
    """Its figures stand from then on, but for what is on disk: nobody is told to recover what is not there."""
    now = {"accepted": 0, "spilled": 9}
    delivered, (first, second) = Delivered(lambda _: dict(now)), map(Path, ("first", "second"))
    for run in (first, second):
        delivered.begin(run)
    delivered.end(first)
    now |= {"accepted": sent, "spilled": 0}

    assert delivered.of(first) == {"accepted": told, "spilled": 0}


def test_a_ring_that_another_drain_has_ended_with_is_left_alone(place: Place, monkeypatch, capfd) -> None:
    """It may be gone by the time that it is ours to read, with the cursor that we know."""
    assert place.run(STEPS, **ON, OTEL_DLTRACE_DRAIN="off").returncode == 0
    first, second = (Drain(Serving(place.rings, place.folder, linger=0.0)) for _ in range(2))

    def late(fd: int) -> bool:
        monkeypatch.setattr(ring_folder, "take_for_reading", take_for_reading)
        first.run(lambda _: None)
        return take_for_reading(fd)

    monkeypatch.setattr(ring_folder, "take_for_reading", late)
    second.tick()

    assert (second.followers, list(place.rings.glob("*.ring"))) == ({}, [])
    assert (capfd.readouterr().err, sum(map(len, place.spans()))) == ("", 6)


FORKS = """
    import os, time
    import otel_dltrace as d
    d.start()
    with d.step(0):
        pass
    child = os.fork()
    if not child:
        os.close(1)
        os.close(2)
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_forked_child_does_not_keep_its_parent_s_ring(place: Place) -> None:
    """The parent's own thread drained it; both are gone, and another drain may go on."""
    child = int(place.run(FORKS, **ON, OTEL_DLTRACE_DRAIN="thread").stdout)
    (ring,) = place.rings.glob("*.ring")
    try:
        with ring.open("rb") as file:
            assert take_for_reading(file.fileno())
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_drains_of_a_host_have_a_folder_each(place: Place) -> None:
    """Two containers on one host, say: of one run, each with rings of its own."""
    program = str(place.write(STEPS))
    both = []
    for rank in range(2):
        rings = place.rings / str(rank)
        env = {**ON, "RANK": str(rank), "WORLD_SIZE": "2", "OTEL_DLTRACE_RUN": "one", "OTEL_DLTRACE_JOB": "one"}
        both.append(place.popen([sys.executable, program], **(env | {"OTEL_DLTRACE_RING_DIR": str(rings)})))
    for child in both:
        assert child.wait(240) == 0, child.communicate()
    servers.wait_until(lambda: not list(place.rings.glob("*/*.ring")), what="the drains")

    (run,) = place.runs()
    assert sorted((batch.rank, len(batch)) for batch in read_run(run)) == [(0, 6), (1, 6)]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="only root has files of several users")
def test_another_user_s_locks_and_rings_end_no_recover(place: Place) -> None:
    """In a shared folder: what may be read is, and what may not be removed is said."""
    place.run(STEPS, **ON, OTEL_DLTRACE_DRAIN="off")
    (ring,) = place.rings.glob("*.ring")
    names = Names()
    names.read(ring.with_suffix(".names").read_bytes())
    locks = [place.rings / f"{name}.lock" for name in (ALL_RINGS, names.home["drain"])]
    for path in locks:
        path.touch(0o600)
    for path in (ring, ring.with_suffix(".names")):
        path.chmod(0o644)
    place.rings.chmod(0o1777)
    for path in (place.rings, *place.rings.iterdir()):
        os.chown(path, 54321, 54321)
    recover = [sys.executable, "-m", "otel_dltrace", "recover"]
    done = place.finish(place.popen(["unshare", "--user", "--map-root-user", *recover]))
    if done.stderr.startswith("unshare: "):
        pytest.skip(done.stderr)

    assert done.returncode == 0, done.stderr
    assert "6 spans recovered" in done.stdout
    assert f"{ring} has been read and cannot be removed: Operation not permitted" in done.stderr
