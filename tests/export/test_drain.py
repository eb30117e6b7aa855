"""The drain: what was recorded is in the run directory, once, whoever dies."""

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pytest

from otel_dltrace.configure.drains import drain_for
from otel_dltrace.configure.outcome import say_where
from otel_dltrace.export import drain as drain_module
from otel_dltrace.export import follower
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.host_time import HostTime
from otel_dltrace.export.metrics.metering import Metering
from otel_dltrace.export.outgoing.departing import tags_of
from otel_dltrace.export.rings.cursor import Cursor
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.time import Anchor
from otel_dltrace.record import detached, guard, launch
from otel_dltrace.record.locks import lock_is_held
from otel_dltrace.record.ring_file import version_of
from otel_dltrace.settings.config import Config
from tests.support.paths import ROOT
from tests.support.processes import Place, abandon, waiting
from tests.support.servers import wait_until

STEPS = """
    import otel_dltrace as d, sys, time
    d.start()
    for i in range(int(sys.argv[1])):
        with d.step(i):
            with d.phase("rollout"):
                pass
            with d.operation("push_pull", size=8, tensor="w"):
                with d.phase("PUSH", size=8):
                    pass
"""


ONE_STEP = """
    import otel_dltrace as d
    d.start()
    with d.step():
        pass
"""
ALONE = {"OTEL_DLTRACE": "1", "RANK": "0", "WORLD_SIZE": "1"}


def names(batch) -> list[str]:
    """Return the spans' names, in order of their start."""
    order = np.argsort(batch["start"], kind="stable")
    return [batch.descriptor_of(int(i)).name for i in order]


def test_every_span_of_a_plain_program_is_in_the_run_directory(place):
    """Three steps of four spans are twelve rows of one process, and the path is printed."""
    result = place.run(waiting(STEPS), "3")

    place.wait_for_rings()
    (batch,) = place.spans()
    assert result.returncode == 0, result.stderr
    assert names(batch) == ["rank.step", "rollout", "push_pull", "PUSH"] * 3
    assert place.runs()[0].name in result.stderr


def test_children_hang_under_their_parents(place):
    """PUSH under push_pull, push_pull and rollout under the rank's step."""
    place.run(STEPS, "1")

    place.wait_for_rings()
    (batch,) = place.spans()
    ids = {batch.descriptor_of(i).name: int(batch["span_id"][i]) for i in range(len(batch))}
    parents = {batch.descriptor_of(i).name: int(batch["parent_id"][i]) for i in range(len(batch))}
    assert parents == {
        "rank.step": 0,
        "rollout": ids["rank.step"],
        "push_pull": ids["rank.step"],
        "PUSH": ids["push_pull"],
    }


WRITER = """
    import otel_dltrace as d, sys, time, mmap, os
    # How far we are, where a kill cannot lose it: written after each record.
    progress = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 8)
    d.start()
    with d.step(0):
        pass
    n = 0
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        with d.operation("op", size=n):
            with d.phase("part", size=n):
                pass
        n += 1
        progress[:8] = n.to_bytes(8, "little")
        if n % 5 == 0:
            time.sleep(0.001)
    d.stop()
"""


def a_writer(place: Place, seconds: float, **env: str):
    """Start a writer that publishes how many operations it has finished."""
    counter = place.folder / "progress"
    counter.write_bytes(bytes(8))
    process = place.start(WRITER, str(counter), str(seconds), **env)
    return process, lambda: int.from_bytes(counter.read_bytes(), "little")


def check_all_there(place: Place, published: int) -> None:
    """Compare what is in the run directory with what the writer published: nothing lost, wrong, or twice."""
    (batch,) = place.spans()
    ids = batch["span_id"]
    assert len(np.unique(ids)) == len(ids)
    for name in ("op", "part"):
        rows = batch.rows[batch.lookup(lambda d, name=name: d.name == name, bool)]
        whole = rows[(rows["flags"] & Flag.TRUNCATED) == 0]
        sizes = np.sort(whole["size"])
        assert len(sizes) >= published, f"{published - len(sizes)} of {published} {name} are lost"
        assert np.array_equal(sizes, np.arange(len(sizes))), name
        assert len(sizes) <= published + 1


def test_a_killed_writer_loses_nothing_that_it_had_recorded(place):
    """SIGKILL in the middle: every published record is there, the open ones are marked."""
    process, published = a_writer(place, 30)
    wait_until(lambda: published() > 100)
    process.kill()
    process.communicate()

    place.wait_for_rings()
    check_all_there(place, published())


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_drain_is_followed_by_one_that_goes_on(place, seed):
    """The drain is killed again and again at random instants; the next one doubles and loses nothing."""
    chance = random.Random(seed)
    process, published = a_writer(place, 4)
    for _ in range(4):
        time.sleep(chance.uniform(0.3, 0.9))
        for drain in place.drains():
            drain.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err

    if list(place.rings.glob("*.ring")):
        assert place.command("recover").returncode == 0
    place.wait_for_rings()
    check_all_there(place, published())


def test_recover_finishes_what_nobody_drained(place):
    """Writer and drain are both killed; recover reads the ring and removes it."""
    process, published = a_writer(place, 30)
    wait_until(lambda: published() > 100)
    victims = [psutil.Process(process.pid), *wait_until(place.drains)]
    for victim in victims:
        victim.kill()
    process.communicate()

    result = place.command("recover")

    assert result.returncode == 0, result.stderr
    assert "spans recovered" in result.stdout
    assert not list(place.rings.glob("*.ring"))
    check_all_there(place, published())


def test_recover_leaves_living_writers_alone(place):
    """A ring whose writer lives is no orphan."""
    process, published = a_writer(place, 2.5)
    wait_until(lambda: published() > 100)

    result = place.command("recover")

    assert "no ring" in result.stdout
    assert process.wait(240) == 0
    process.communicate()


@pytest.mark.parametrize("mode", ["auto", "thread"])
def test_a_flush_is_told_that_all_is_read_also_where_nothing_is_new(place, mode):
    """The second one, and each where a thread drains, waited for as long as it was let, and said no."""
    flushes = """
        import otel_dltrace as d
        d.start()
        for _ in range(3):
            with d.step():
                pass
        print(d.flush(60), d.flush(10))
    """
    done = place.run(flushes, OTEL_DLTRACE_DRAIN=mode)

    assert done.stdout == "True True\n"


def test_a_flush_that_is_told_no_seconds_takes_its_own(place):
    """Where nothing is traced no argument of it raises, and so it is where something is."""
    flushes = """
        import otel_dltrace as d
        d.start()
        with d.step():
            pass
        print(d.flush("60"), d.flush(None), d.flush(None))
    """
    done = place.run(flushes)

    told = "otel_dltrace: flush() takes a number of seconds, not a NoneType; using 2"
    assert (done.returncode, done.stderr.splitlines()[0], done.stderr.count(told)) == (0, told, 1)


def test_a_thread_drains_where_no_process_may_be_started(place):
    """OTEL_DLTRACE_DRAIN=thread: the same spans, and no drain process."""
    process, published = a_writer(place, 1.0, OTEL_DLTRACE_DRAIN="thread")
    wait_until(lambda: published() > 100)
    drains = place.drains()
    _, err = process.communicate(timeout=240)

    assert drains == []
    assert process.returncode == 0, err
    check_all_there(place, published())


def test_the_drain_is_found_where_the_program_has_found_us(place):
    """By its own `sys.path`, in a Python that has us not installed."""
    bare = place.folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    (libraries,) = bare.glob("lib/python*/site-packages")
    (libraries / "more.pth").write_text(sysconfig.get_path("purelib"))
    program = f"""
    import sys
    sys.path.append({str(ROOT)!r})
    import otel_dltrace
    otel_dltrace.start()
    with otel_dltrace.step():
        pass
    """
    done = place.finish(place.popen([str(bare / "bin" / "python"), str(place.write(program))], PYTHONPATH=""))
    place.wait_for_drains()

    assert done.returncode == 0, done.stderr
    assert [len(batch) for batch in place.spans()] == [1]


@pytest.mark.parametrize("executable", [None, ""])
def test_a_thread_drains_where_python_has_no_executable(place, executable):
    """As in a program that it is embedded in."""
    program = f"""
    import sys, otel_dltrace
    sys.executable = {executable!r}
    with otel_dltrace.step():
        pass
    """
    done = place.run(program, OTEL_DLTRACE="1")

    assert "a thread drains instead" in done.stderr.splitlines()[0]
    assert [len(batch) for batch in place.spans()] == [1]


def test_a_drain_that_cannot_begin_is_not_started_every_second(place, monkeypatch, capfd):
    """Each would take a processor for a second; one sentence says why there is none, and later another is tried."""
    monkeypatch.setattr(guard, "_said", set())
    place.write("raise ImportError('broken')", "pyarrow.py")
    env = {"PYTHONPATH": os.pathsep.join([str(place.folder), os.environ.get("PYTHONPATH", "")])}
    starter = launch.DrainStarter("home", place.rings, "auto", env, lambda _ring: None)
    starter.start_process()
    wait_until(lambda: not lock_is_held(place.rings / "home.lock"), what="the end of the drain")

    def is_started():
        starter.start(None)
        return lock_is_held(place.rings / "home.lock")

    assert not is_started()
    assert not is_started()
    monkeypatch.setattr(launch, "RETRY_S", 0.0)
    assert is_started()
    why = "the drain has ended (ImportError: broken); spans wait in the ring while it has room"
    assert capfd.readouterr().err == f"otel_dltrace: {why}\n"


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "done"])
def test_a_drain_that_did_not_fail_is_started_again_at_once(place, capfd, is_killed):
    """Whatever is in its log, as the complaint of a library; it may have been killed, or be done."""
    env = {"OTEL_DLTRACE_RING_DIR": str(place.rings), "OTEL_DLTRACE_DIR": str(place.folder)}
    starter = launch.DrainStarter("home", place.rings, "auto", env, lambda _ring: None)
    starter.start(None)
    if is_killed:
        wait_until(starter.bell.is_fifo, what="the drain's bell")
        (drain,) = place.drains()
        drain.kill()
    wait_until(lambda: not lock_is_held(place.rings / "home.lock"), what="the drain's end")
    starter.log.write_text("ERROR: ld.so: object '/opt/gone/x.so' cannot be preloaded: ignored.\n")
    starter.start(None)

    assert (lock_is_held(place.rings / "home.lock"), capfd.readouterr().err) == (True, "")


def test_a_thread_drains_where_no_second_process_may_be_started(place, capfd, monkeypatch):
    """The one that starts the drain is the first."""
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setattr(detached, "_PARENT", "raise BlockingIOError(11, 'Resource temporarily unavailable')")
    starter = launch.DrainStarter("home", place.rings, "auto", {}, lambda _ring: None)
    starter.start(None)

    assert starter.mode == "thread"
    assert "no drain process can be started" in capfd.readouterr().err


def test_a_program_that_becomes_another_user_does_not_wait_for_its_drain(place, monkeypatch, capfd):
    """`setuid` closes the folder of rings to it: the drain reads on, and one sentence says where its spans will be."""
    monkeypatch.setattr(guard, "_said", set())
    starter = launch.DrainStarter("home", place.rings, "auto", {}, lambda _ring: None)
    ring = SimpleNamespace(path=place.rings / "mine.ring", is_held=lambda: True)
    was, run = os.geteuid(), place.folder / "run"
    ring.path.touch()
    place.rings.chmod(0)
    os.seteuid(65534 if was == 0 else was)
    try:
        starter.start(ring)
        say_where(run, starter.finish(ring.path, 9.0), starter, is_over=False)
    finally:
        os.seteuid(was)
        place.rings.chmod(0o700)

    shut = f"otel_dltrace: this process has another user now, who may not enter {place.rings}: its drain is neither"
    said = capfd.readouterr().err
    assert said.startswith(f"{shut} waited for nor replaced\n{shut} waited for nor replaced; the spans will be in ")
    assert said.count("\n") == 2

    starter.look_at(ring)
    assert (starter.is_shut_out, starter.lost) == (False, "")  # it was for a while


def test_a_drain_is_started_once_at_a_time(place, capfd):
    """What one in a thread imports collects garbage, which is recorded, and asks for a drain."""
    started = []

    def start_thread(ring):
        started.append(ring)
        starter.start(ring)
        return launch.DrainThread(lambda: None, lambda _timeout: None)

    starter = launch.DrainStarter("home", place.rings, "thread", {}, start_thread)
    ring = SimpleNamespace(path=place.rings / "mine.ring", is_held=lambda: False)
    starter.start(ring)
    starter.start(ring)

    assert (started, capfd.readouterr().err) == ([ring], "")


def test_why_a_thread_has_left_the_ring_is_told_at_the_end(place, monkeypatch, capfd):
    """As of a full disk: it is not at work any more."""
    why = f"{place.rings}/mine.ring cannot be emptied into its run directory (No space left) and stays where it is"
    monkeypatch.setattr(guard, "_said", {why, f"{place.rings}/other.ring is no ring"})
    thread = launch.DrainThread(lambda: None, lambda _timeout: None)
    starter = launch.DrainStarter("home", place.rings, "thread", {}, lambda _ring: thread)
    ring = SimpleNamespace(path=place.rings / "mine.ring", is_held=lambda: False)
    ring.path.touch()
    (place.folder / "run").mkdir()
    starter.start(ring)
    say_where(place.folder / "run", starter.finish(ring.path, 0.0), starter, is_over=False)

    assert f"so far {why}; in " in capfd.readouterr().err


def test_where_no_thread_may_be_started_the_end_says_what_reads_the_ring(place, monkeypatch, capfd):
    """Nothing of the drain is imported: OpenBLAS interrupts the program where it gets no thread."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setattr(launch.threading.Thread, "start", refuse)
    starter = launch.DrainStarter("home", place.rings, "thread", {}, lambda _ring: pytest.fail("begun"))
    ring = SimpleNamespace(path=place.rings / "mine.ring", is_held=lambda: False)
    ring.path.touch()
    starter.start(ring)
    starter.start(ring)
    say_where(place.folder / "run", starter.finish(ring.path, 0.0), starter, is_over=False)

    first, last = capfd.readouterr().err.splitlines()
    why = "(can't start new thread): spans wait in the ring while it has room; that is tried again"
    assert first == f"otel_dltrace: no thread can drain {why}"
    assert f"{place.rings}, which no drain serves (none could be started); `OTEL_DLTRACE_RING_DIR=" in last


@pytest.mark.parametrize("is_at_work", [True, False], ids=["at work", "gone"])
def test_what_a_drain_at_work_complained_of_is_no_reason(place, monkeypatch, is_at_work):
    """Unless it is of the ring that is waited for; of one that is gone the last words are."""
    monkeypatch.setattr(launch, "lock_is_held", lambda _: is_at_work)
    monkeypatch.setattr(launch.DrainStarter, "start_process", lambda _: None)  # it would begin the log anew
    starter = launch.DrainStarter("home", place.rings, "auto", {}, lambda _ring: None)
    reasons = []
    for name in ("mine.ring", "other.ring"):
        (place.rings / name).touch()
        starter.log.write_text("otel_dltrace: mine.ring is damaged\notel_dltrace: a variable is wrong\n")
        assert not starter.finish(place.rings / name, 0.0)
        reasons.append(starter.why_left())
        (place.rings / name).unlink()

    assert reasons == (["mine.ring is damaged", ""] if is_at_work else ["a variable is wrong"] * 2)


def test_a_pipe_where_a_drain_was_to_complain_holds_nobody_up(place):
    """In a folder that others write to; no drain is started, and none of its words are known."""
    starter = launch.DrainStarter("home", place.rings, "auto", {}, lambda _ring: None)
    os.mkfifo(starter.log)
    with pytest.raises(OSError, match="No such device"):
        starter.start_process()
    assert starter.trouble() == ""


def test_what_drains_left_goes_after_a_day(place):
    """With the next drain of the folder, unless its own is still at work; one that was killed has left its lock."""
    logs = {name: place.rings / f"{name}.log" for name in ("old", "killed", "new", "working")}
    for name, path in logs.items():
        path.write_text("a variable is wrong")
        if name != "old":
            path.with_suffix(".lock").touch()
            path.with_suffix(".bell").touch()
        if name != "new":
            os.utime(path, (0, 0))
    holds = "from otel_dltrace.record.locks import take_lock as t; from pathlib import Path as P; "
    code = f"{holds}t(P({str(place.rings / 'working.lock')!r})); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as working:
        working.stdout.readline()
        Drain(Serving(place.rings, place.folder, linger=0.0)).run()
        working.communicate("\n")

    left = sorted(path.name for path in place.rings.iterdir())
    assert left == [f"{name}.{kind}" for name in ("new", "working") for kind in ("bell", "lock", "log")]


def test_a_program_may_wait_for_all_its_children(place):
    """The drain is none of them: each would wait for the other."""
    program = """
        import os, otel_dltrace as d
        with d.step():
            pass
        child = os.fork()
        if not child:
            os._exit(3)
        seen = []
        try:
            while True:
                seen.append(os.wait())
        except ChildProcessError:
            print(seen == [(child, 3 << 8)])
    """
    done = place.run(waiting(program), OTEL_DLTRACE="1")

    assert done.stdout == "True\n", done.stderr
    assert [len(batch) for batch in place.spans()] == [1]


@pytest.mark.parametrize("mode", ["auto", "thread"])
def test_forked_children_have_rings_of_their_own(place, mode):
    """A child's spans are its own process's, under the same descriptors; its parent's thread drains nothing there."""
    program = """
        import os, otel_dltrace as d
        d.start()
        with d.step(0):
            with d.phase("before"): pass
            child = os.fork()
            with d.phase("both"): pass
            if child == 0:
                d.stop()
                os._exit(0)
            os.waitpid(child, 0)
    """
    result = place.run(waiting(program), OTEL_DLTRACE_DRAIN=mode)

    assert result.returncode == 0, result.stderr
    assert list(place.rings.glob("*.ring")) == []
    phases = sorted([n for n in names(batch) if n != "rank.step"] for batch in place.spans())
    assert phases == [["before", "both"], ["both"]]


def test_a_stage_on_two_threads_counts_what_both_did(place):
    """Each writes in a chunk of its own, so what came last of the stage is not last in the ring."""
    done = place.run(
        """
        import threading
        import otel_dltrace as d

        def copy():
            with d.phase("to_device"):
                pass

        for _ in range(2):
            with d.step():
                copy()
                other = threading.Thread(target=copy)
                other.start()
                other.join()
                copy()
        """,
        **ALONE,
        OTEL_DLTRACE_DRAIN="off",
    )
    assert done.returncode == 0, done.stderr
    place.command("recover")

    (batch,) = place.spans()
    assert batch["a"][batch.lookup(lambda d: d.name == "to_device", bool)].tolist() == [3, 3]


def test_a_drain_reads_more_rings_at_once_than_a_program_may_have_files(place):
    """It has as many as the system allows, not as few as a shell gives a program."""
    done = place.run(
        """
        import os, resource
        import otel_dltrace as d

        resource.setrlimit(resource.RLIMIT_NOFILE, (48, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for i in range(24):
            if os.fork() == 0:
                with d.phase("child", size=i):
                    pass
                os._exit(0)
        for _ in range(24):
            os.wait()
        """,
        **ALONE,
        OTEL_DLTRACE_RING_SIZE="128K",
    )
    place.wait_for_rings()

    assert done.returncode == 0, done.stderr
    assert sorted(int(batch["size"][0]) for batch in place.spans()) == [*range(24)]


NAMES_A_TIMELINE = """
    import otel_dltrace as d
    from otel_dltrace.record.tracer import live
    d.start()
    for i in range(3):
        with d.step(i):
            pass
        live.tracer.recorder.follow("timeline.json")
"""


ON_DEMAND = """
    import sys
    import otel_dltrace as d
    d.start()
    for line in sys.stdin:
        for _ in range(int(line)):
            with d.step():
                pass
        print("written", flush=True)
"""


class Away:
    """A way out on whose disk spans wait."""

    def __init__(self) -> None:
        self.sent = self.spilled = 0

    def send(self, _batch, outgoing) -> None:
        """Have them wait."""
        self.spilled += sum(len(out.rows) for out in outgoing)
        self.sent += sum(len(out.rows) for out in outgoing)

    def figures(self, _run: Path) -> dict:
        """Return how many."""
        return {"otlp": {"sent": self.sent, "spilled": self.spilled}}

    def unsettled(self) -> set:
        """Return nothing."""
        return set()

    def spill_to(self, *_) -> None:
        """Do nothing."""

    flush = close = spill_to


class Slow(Away):
    """A way out that delivers nothing till it *is_fast*."""

    def __init__(self) -> None:
        super().__init__()
        self.is_fast, self._tags = False, set()

    def send(self, batch, outgoing) -> None:
        """Have them wait."""
        super().send(batch, outgoing)
        self._tags |= tags_of(batch, outgoing)

    def unsettled(self) -> set:
        """Return of what."""
        return set() if self.is_fast else self._tags


@pytest.fixture
def outlet():
    """Give none; a test that wants one says which."""


@pytest.fixture
def ticked(place, outlet, monkeypatch):
    """Give a drain whose clock is set by hand: ``at(s, n)`` has *n* steps written and ticks at *s*; rows so far."""
    env = place.env(OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RING_SIZE="256K", **ALONE)
    command = [sys.executable, str(place.write(ON_DEMAND))]
    pipe = subprocess.PIPE
    writer = subprocess.Popen(command, cwd=place.folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    seconds = 0.0
    clock = SimpleNamespace(monotonic=lambda: seconds, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
    monkeypatch.setattr(drain_module, "time", clock)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0, delay=5.0), outlet)

    def at(now: float, steps: int) -> int:
        nonlocal seconds
        seconds = now
        writer.stdin.write(f"{steps}\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "written\n"
        drain.tick()
        return sum(writer.rows for writer in drain.runs.writers.values())

    at.drain = drain
    yield at
    writer.communicate()
    while drain.followers:
        drain.tick()
    drain.finish()


def test_where_nothing_goes_out_nothing_is_kept_to_be_sent_again(ticked):
    """The last step has not been decided where spans go out; here the cursor says that all of them are delivered."""
    ticked(0.0, 10)
    ticked(5.0, 10)
    (cursor,) = [Cursor.read(path) for path in ticked.drain.serving.rings.glob("*.cursor")]

    assert [(place.undelivered, place.loose) for place in cursor.places.values()] == [(NO_STEP, False)]


@pytest.mark.parametrize("outlet", [Slow()])
def test_what_is_delivered_between_two_reads_is_not_sent_again(ticked, outlet):
    """The cursor says so in the next turn; one in which nothing is delivered writes none."""

    def after(now: float, steps: int) -> tuple[int, object]:
        ticked(now, steps)
        (path,) = ticked.drain.serving.rings.glob("*.cursor")
        (place,) = Cursor.read(path).places.values()
        return place.undelivered, version_of(path)

    first, waits = after(0.0, 10), after(1.0, 0)
    outlet.is_fast = True
    delivered, nothing_new = after(2.0, 0), after(3.0, 0)

    assert (first[0], delivered[0]) == (0, 9)  # the last step is not decided
    assert (waits, nothing_new) == (first, delivered)


@pytest.mark.parametrize("outlet", [Slow()])
def test_what_a_drain_had_read_and_delivered_is_known_when_it_is_killed(ticked, place, outlet):
    """Once its cursor says that it is not sent again; the next drain adds what it sends itself."""
    ticked(1.0, 10)
    outlet.is_fast = True
    ticked(2.0, 0)
    (told,) = (summary for run in place.runs() for summary in read_summaries(run))

    assert told["so_far"] == 10
    assert told["summary"]["otlp"]["sent"] == 18  # nine steps and their roots: the last one is not decided


@pytest.mark.parametrize("together", [1, 1 << 20])
def test_every_ring_is_read_however_many_there_are(place, monkeypatch, together):
    """So many are read together as memory has room for, and the others after them."""
    monkeypatch.setattr(drain_module, "TOGETHER", together)
    for _ in range(3):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", **ALONE).returncode == 0
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    drain.run()

    assert [len(batch) for run in place.runs() for batch in read_run(run)] == [1, 1, 1]


@pytest.fixture
def staying(place, outlet, monkeypatch):
    """Give a drain that stays: ``after(s)`` is what it has open of runs, and which of them say that they have ended."""
    seconds = 0.0
    clock = SimpleNamespace(monotonic=lambda: seconds, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
    monkeypatch.setattr(drain_module, "time", clock)
    drain = Drain(Serving(place.rings, place.folder, linger=float("inf"), delay=0.0), outlet)

    def after(now: float) -> tuple[int, list[bool]]:
        nonlocal seconds
        seconds = now
        drain.tick()
        opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        told = [json.loads(path.read_text())["ended"] for path in place.folder.glob("dltrace-*/hosts/*/drain.json")]
        return sum(path.startswith(f"{place.folder}/dltrace-") for path in opened), told

    yield after
    drain.finish()


def test_a_drain_that_stays_lets_go_of_the_runs_that_have_ended(place, staying):
    """Some seconds after their last rings: of a sweep of thousands it had three files of each open, and no Parquet.

    One in a turn, since meanwhile no ring is read.
    """
    for _ in range(3):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", **ALONE).returncode == 0

    assert staying(0.0) == (9, [False] * 3)
    assert staying(4.0) == (9, [False] * 3)
    assert [(files, sum(ended)) for files, ended in map(staying, (6.0, 7.0, 8.0))] == [(6, 1), (3, 2), (0, 3)]
    assert [path.suffix for path in place.folder.glob("dltrace-*/hosts/*/s*")] == [".parquet"] * 3


def test_a_run_whose_ranks_come_again_is_taken_up_again(place, staying):
    """Its figures go on."""
    for now in (0.0, 10.0):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RUN="one", **ALONE).returncode == 0
        assert staying(now) == (3, [False])
        assert staying(now + 6.0) == (0, [True])

    (run,) = place.runs()
    (told,) = read_summaries(run)
    assert (told["summary"]["processes"], told["summary"]["spans"]) == (2, 2)
    assert [len(batch) for batch in read_run(run)] == [1, 1]


def test_a_run_goes_on_while_ranks_come_and_go(place, staying):
    """However short each is: else there would be a Parquet for each."""
    for now in (0.0, 4.0, 8.0):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RUN="one", **ALONE).returncode == 0
        assert staying(now) == (3, [False])

    assert staying(13.0) == (0, [True])
    assert [path.suffix for path in place.folder.glob("dltrace-*/hosts/*/s*")] == [".parquet"]


@pytest.mark.parametrize("outlet", [Away()])
def test_a_run_whose_spans_wait_on_disk_is_finished_and_kept(place, staying, outlet):
    """Its folder is the drain's until they are sent, and its figures say so then; those of the next time are added."""
    for now in (0.0, 20.0):
        assert place.run(ONE_STEP, OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RUN="one", **ALONE).returncode == 0
        staying(now)
        assert staying(now + 6.0)[1] == [False]
        assert [path.suffix for path in place.folder.glob("dltrace-*/hosts/*/s*")][:1] == [".parquet"]
        outlet.spilled = 0
        assert staying(now + 7.0) == (0, [True])

    (told,) = (summary["summary"]["otlp"] for run in place.runs() for summary in read_summaries(run))
    assert told == {"sent": 4, "spilled": 0}  # each time a step and its root


def test_rings_are_read_together_every_few_seconds(ticked):
    """At once at first, and when the delay is over: then with every step that has ended, and no stage to wait for."""
    assert [ticked(now, 10) for now in (0.0, 1.0, 4.9, 5.0, 9.9, 10.0)] == [10, 10, 10, 40, 40, 60]


@pytest.mark.parametrize(("samples", "known"), [(False, [0, 0, 1]), (True, [0, 1, 1])], ids=["spans", "metrics"])
def test_who_a_rank_is_that_is_sampled_is_read_at_once(ticked, samples, known):
    """It has its samples from then on, not from the next time on that all rings are read."""
    ticked.drain.metering = Metering(None, samples, Window.parse("all"), quota=1 << 30)
    found = []
    for now, steps in ((0.0, 1), (1.0, 9), (5.0, 9)):
        ticked(now, steps)
        found.append(sum(len(follower.members) for follower in ticked.drain.followers.values()))

    assert found == known


def test_a_ring_that_fills_is_read_before_its_time(ticked):
    """A quarter of it is not left there: of a drain that is killed the next one finds all that it had not passed on."""
    assert [ticked(now, steps) for now, steps in ((0.0, 10), (1.0, 200), (2.0, 400), (3.0, 10))] == [10, 10, 610, 610]


def test_what_a_ring_has_lost_is_known_to_the_drain_after_a_killed_one(ticked, place):
    """It counts what it loses itself, and takes over what its predecessor had counted."""
    first = ticked.drain
    assert ticked(0.0, 10) < ticked(10.0, 4000) < 4010
    ((path, before),) = first.followers.items()
    abandon(first)

    second = Drain(Serving(place.rings, place.folder, linger=0.0))
    second.tick()
    assert second.followers[path].source.lapped == before.source.lapped != [0] * 5
    abandon(second)
    first.followers.clear()


def test_a_drain_goes_on_with_the_clock_of_the_killed_one(ticked, place, monkeypatch):
    """A span that is sent again is the same to the ns: a back end shows it once."""
    first = ticked.drain
    assert ticked(0.0, 10) == 10
    before = first.time.anchor
    abandon(first)

    monkeypatch.setattr(HostTime, "_read", lambda _: Anchor(0, before.offset + 500, 0))
    second = Drain(Serving(place.rings, place.folder, linger=0.0))
    second.tick()
    assert [member.process.anchor for f in second.followers.values() for member in f.members] == [before]
    abandon(second)
    first.followers.clear()


@pytest.mark.parametrize(
    ("said", "delay"), [pytest.param("250", 0.25, id="as told"), pytest.param("often", 5.0, id="not a number")]
)
def test_how_long_spans_wait_is_a_variable_of_the_sdk(monkeypatch, capsys, place, said, delay):
    """One that cannot be used is told of, and spans go on."""
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", said)
    made = drain_for(Config(ring_directory=str(place.rings)), None)
    made.finish()

    assert made.serving.delay == delay
    assert capsys.readouterr().err.count("OTEL_BSP_SCHEDULE_DELAY='often' is not a number") == (said == "often")


def test_a_wall_clock_that_is_set_back_is_told_of_once(place, monkeypatch, capsys):
    """What goes out later has the new time; a clock that is kept in step moves by less, and says nothing."""
    monkeypatch.setattr(guard, "_said", set())
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    offset, said = drain.time.anchor.offset, []
    for moved_ms in (0, 20, -3_600_000, -7_200_000):
        monkeypatch.setattr(drain.time, "_read", lambda: Anchor(0, offset + moved_ms * 1_000_000, 0))  # noqa: B023
        drain.tick()
        said.append((drain.time.anchor.offset - offset, capsys.readouterr().err.count("was set back by 3600.0 s")))
    drain.finish()

    assert said == [(0, 0), (20_000_000, 0), (-3_600 * 10**9, 1), (-7_200 * 10**9, 0)]


def test_a_timeline_that_cannot_be_joined_costs_no_spans(place, monkeypatch, capsys):
    """The descriptors that an earlier drain wrote are damaged: the process's own spans go on, and its ring goes."""
    place.run(NAMES_A_TIMELINE, OTEL_DLTRACE_DRAIN="off")

    def damaged(_folder: Path) -> None:
        raise pa.ArrowInvalid("not an Arrow file")

    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setattr(follower, "read_descriptors", damaged)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    drain.run()
    (batch,) = place.spans()

    assert names(batch) == ["rank.step"] * 3
    assert (drain.rings.refused, list(place.rings.glob("*.ring"))) == ({}, [])
    assert capsys.readouterr().err.count("Follower._join failed and is not traced (ArrowInvalid") == 1
