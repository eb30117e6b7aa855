"""The drain: what was recorded is in the run directory, once, whoever dies."""

import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from otel_dltrace.configure.outcome import say_where
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.semconv import Flag
from otel_dltrace.record import detached, guard, launch
from otel_dltrace.record.launch import ALL_RINGS
from otel_dltrace.record.locks import lock_is_held, take_lock
from tests.support.paths import ROOT
from tests.support.processes import Place, waiting
from tests.support.servers import wait_until
from tests.support.steps import ALONE, names

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


def test_a_second_drain_of_a_folder_of_rings_is_one_sentence(place):
    """Exit code 2: two would read the same rings."""
    place.rings.mkdir(exist_ok=True)
    lock = take_lock(place.rings / f"{ALL_RINGS}.lock")
    try:
        done = place.command("drain")
    finally:
        os.close(lock)
    assert (done.returncode, f"another drain serves {place.rings}; one is enough" in done.stderr) == (2, True)
