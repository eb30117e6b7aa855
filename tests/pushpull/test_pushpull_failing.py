"""push_pull jobs of which a process dies, hangs, leaves or disagrees: the others end in time and name it."""

import signal

import pytest

from tests.support.pushpull_jobs import ALONE, SERVED, SMALL, run_job

DYING = """
push_pull("w", np.ones(2000, np.float32))
if layout.rank == {dies}:
    os.kill(os.getpid(), signal.SIGKILL)
for round in range(1000000):
    push_pull("w", np.ones(2000, np.float32))
"""


def test_a_killed_worker_is_named_by_the_others(tmp_path):
    """Each other process ends with an error that says who died, its local ranks too."""
    done = run_job(tmp_path, DYING.format(dies=2), (2, 2, 1), SMALL)
    assert done.code == 128 + signal.SIGKILL
    assert "local rank 0 of worker 1 was killed by SIGKILL; ending the others" in done.stderr
    died = "local rank 0 of worker 1 died or was killed"
    assert done.each("message") == {
        "worker0": f"worker 1: {died}",
        "worker1": f"worker 1: {died}",
        "worker3": died,
    }


def test_a_killed_root_is_noticed_by_its_servers(tmp_path):
    """The session with the server breaks, and the server tells the other workers."""
    done = run_job(tmp_path, DYING.format(dies=1), (2, 1, 2), SMALL)
    assert done.code == 128 + signal.SIGKILL
    silent = "its connection closed; it died, was killed, or did not answer for 120 s"
    assert done.each("message") == {"worker0": f"worker 1: {silent}"}


def test_a_root_that_stands_still_is_given_the_timeout(tmp_path):
    """As long as that, not as long as gRPC would; it is not called dead, which nobody knows."""
    server = """
    global options
    import dataclasses
    options = dataclasses.replace(options, timeout_s=2)
    """
    program = """
    import time
    if layout.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    end = time.monotonic() + 40  # gRPC gives a ping a minute
    while engine.error is None and time.monotonic() < end:
        time.sleep(0.01)
    push_pull("w", np.ones(2, np.float32))
    """
    done = run_job(tmp_path, program, (2, 1, 1), server=server, grace_s=0.2)
    silent = "its connection closed; it died, was killed, or did not answer for 2 s"
    assert done.each("message") == {"worker0": f"worker 1: {silent}"}


GOING = """
import asyncio, grpc
from otel_dltrace.pushpull.server import Server
guarded = Server._guarded
def going(self, call):
    if call.__name__ != "_push":
        return guarded(self, call)
    async def answer(body, context):
        say = lambda: asyncio.ensure_future(self._let_go(1, "it was killed"))
        asyncio.get_running_loop().call_later(0.2, say)
        await context.abort(grpc.StatusCode.CANCELLED)
    return answer
Server._guarded = going
"""


def test_a_server_that_is_going_has_a_moment_to_say_why(tmp_path):
    """A request that comes too late is cancelled; the reason comes with the session, in its own time."""
    program = """
    from otel_dltrace.pushpull import client
    client._LAST_WORD_S = 60.0
    push_pull("w", np.ones(2, np.float32))
    """
    done = run_job(tmp_path, program, (2, 1, 1), SMALL, server=GOING)
    assert done.each("message") == dict.fromkeys(["worker0", "worker1"], "worker 1: it was killed")


HANGS = """
import time
if layout.worker:
    engine.declare("w")
    while len([name for name in os.listdir(OUT) if name.startswith("pulling")]) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
class Watch:
    follows_stages = True
    def __init__(self):
        self.told = []
    def push_pull_started(self, *told):
        return self
    def request_sending(self, partition):
        return {"traceparent": ""}
    def stage_finished(self, partition, queue, nbytes, server, enqueued, started, end):
        assert enqueued <= started <= end
        self.told.append([queue.name, partition, server])
    def completed(self, end, error):
        say(told=sorted(self.told), error=repr(error))
    def waited(self, start, end):
        pass
trace.observe(Watch())
push_pull("w", np.ones(2000, np.float32))
"""


@pytest.mark.parametrize(
    "clock",
    [
        pytest.param("", id="a clock as most are"),
        pytest.param("import time\ntime.monotonic_ns = lambda: 1\n", id="a clock that ticks seldom"),
    ],
)
def test_what_a_request_waited_for_in_vain_is_observed(clock, tmp_path):
    """The stage ends with its push_pull: a server has answered it with an error, which would be below nothing."""
    done = run_job(tmp_path, clock + HANGS, (2, 1, 1), SMALL, server=SERVED)
    assert done.each("told") == {
        "worker0": [
            [name, part, 0 if name in ("PUSH", "PULL") else None]
            for name in ("COPYD2H", "PULL", "PUSH", "REDUCE")
            for part in (0, 1)
        ]
    }


GIVES_UP = """
import threading
from otel_dltrace.pushpull.work import Work
class Watch:
    follows_stages = True
    def __init__(self):
        self.told = []
    def push_pull_started(self, *told):
        return self
    def request_sending(self, partition):
        return {{}}
    def stage_finished(self, partition, queue, nbytes, server, enqueued, started, end):
        self.told.append((end, queue.name))
        {while_told}
    def completed(self, end, error):
        self.told.append((end, type(error).__name__))
    def waited(self, start, end):
        pass
def part(memory, task):
    {while_done}
    return Work._part(engine._work, memory, task)
engine._work._part = part
watch = Watch()
trace.observe(watch)
try:
    push_pull("w", np.ones(2, np.float32))
except PushPullError:
    for thread in threading.enumerate():
        if thread.name.startswith("pushpull-"):
            thread.join(60)
    say(told=[what for _, what in sorted(watch.told)])
"""
GIVE_UP = 'engine.fail(PushPullError("given up"))'


@pytest.mark.parametrize(
    ("when", "told"),
    [
        pytest.param(
            {"while_told": f"if queue.name == 'PUSH': {GIVE_UP}", "while_done": ""},
            ["REDUCE", "COPYD2H", "PUSH", "PushPullError"],
            id="as the end of a request is told",
        ),
        pytest.param({"while_told": "", "while_done": GIVE_UP}, ["PushPullError"], id="within a stage"),
    ],
)
def test_no_stage_ends_twice_or_after_its_push_pull_has_failed(when, told, tmp_path):
    """Another thread may give up at any moment; what is not over by then has no end of its own."""
    done = run_job(tmp_path, GIVES_UP.format(**when), (1, 1, 1), {**SMALL, **ALONE})
    assert done.each("told") == {"worker0": told}


def test_a_killed_server_is_named_by_the_workers(tmp_path):
    """All workers end with an error that says which server is gone."""
    server = """
    import threading
    if os.environ["DMLC_SERVER_ID"] == "1":
        class Dies:
            def request_answered(self, kind, request, *told):
                if kind == "push" and request.round == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        trace.observe(Dies())
    """
    program = """
    for round in range(1000000):
        for name in "abcdef":
            push_pull(name, np.ones(2000, np.float32))
    """
    done = run_job(tmp_path, program, (2, 1, 2), SMALL, server=server)
    assert done.code == 128 + signal.SIGKILL
    assert "server 1 was killed by SIGKILL" in done.stderr
    messages = done.each("message")
    assert list(messages) == ["worker0", "worker1"]
    assert any("server 1 at 127.0.0.1:" in message and "gone" in message for message in messages.values()), messages


@pytest.mark.parametrize(
    "asks", [pytest.param("", id="waits"), pytest.param("while not engine.poll(late): pass", id="polls")]
)
@pytest.mark.parametrize(
    ("counts", "says"),
    [
        pytest.param((2, 1, 1), "no push from worker 1 within 1 s: round 0 of 'late' (key 0)", id="worker"),
        pytest.param(
            (1, 2, 0),
            "no word from local rank 1 within 1 s: partition 0 of 'late' is at REDUCE",
            id="local rank",
        ),
    ],
)
def test_who_does_not_come_is_named_after_the_timeout(counts, says, asks, tmp_path):
    """A process that lives but does not push makes no hang; who it is comes first, for a span keeps 36 bytes."""
    server = """
    global options
    import dataclasses
    options = dataclasses.replace(options, timeout_s=1)
    """
    program = f"""
    import dataclasses
    engine.options = dataclasses.replace(options, timeout_s=1)  # now that all have come
    if layout.rank == 1:
        signal.pause()
    signal.alarm(60)
    late = engine.push_pull(engine.declare("late"), np.ones(10, np.float32), average=False)
    {asks}
    engine.wait(late)
    """
    done = run_job(tmp_path, program, counts, server=server, grace_s=0.2)
    assert done.code == 3
    assert done.each("message") == {"worker0": says}


AHEAD = """
import time
for name in ("on server 1", "on server 0"):
    push_pull(name, np.ones(1, np.float32))
stood_still = os.path.join(OUT, "stood still")
if layout.worker and {stands_still}:
    with open(os.path.join(OUT, "server")) as file:
        os.kill(int(file.read()), signal.SIGSTOP)
    os.mkdir(stood_still)
    push_pull("on server 1", np.ones(1, np.float32))
if layout.worker:
    signal.pause()
while {stands_still} and not os.path.exists(stood_still):
    time.sleep(0.01)
say(where=engine._servers._where(1))
push_pull("on server 0", np.ones(1, np.float32))
"""
WAITED_FOR = """
global options
import dataclasses
options = dataclasses.replace(options, timeout_s=3)
if options.server == 1:
    with open(os.path.join(OUT, "server"), "w") as file:
        file.write(str(os.getpid()))
"""


@pytest.mark.parametrize(
    ("stands_still", "says"),
    [
        pytest.param(True, "{where}: no answer within 2 s; {late}", id="it stands still"),
        pytest.param(False, "{late}", id="it answers"),
    ],
)
def test_a_server_for_which_a_late_worker_waits_is_named(stands_still, says, tmp_path):
    """The worker learns it no sooner than others that it is late: who gives it up asks the servers first."""
    done = run_job(tmp_path, AHEAD.format(stands_still=stands_still), (2, 1, 2), server=WAITED_FOR, grace_s=2)
    late = "no push from worker 1 within 3 s: round 1 of 'on server 0' (key 65536)"
    where = done.each("where")["worker0"]
    assert done.each("message")["worker0"] == says.format(where=where, late=late)


STANDS_STILL = """
import dataclasses
push_pull("met", np.ones(1, np.float32))
engine.options = dataclasses.replace(options, timeout_s=1)
if layout.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
signal.alarm(60)
push_pull("w", np.ones(1 << 21, np.float32))
"""


def test_who_reads_nothing_keeps_nobody(tmp_path):
    """A local rank that stands still, and has more unread than its socket holds, does not get the goodbye either."""
    done = run_job(tmp_path, STANDS_STILL, (1, 2, 0), SMALL, grace_s=0.2)
    assert done.code == 3
    message = done.each("message")["worker0"]
    assert message.startswith("not done within 1 s: partition ")
    assert message.endswith(" of 'w' is at COORDINATE_REDUCE")


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        pytest.param((2, 1, 1), "worker 1 has left and never pushed round 1 of 'w'", id="worker"),
        pytest.param((1, 2, 0), "local rank 1 has shut down and never got to 'w'", id="local rank"),
    ],
)
def test_who_ends_early_is_named(counts, says, tmp_path):
    """A process that shut down in order is not waited for."""
    program = """
    for round in range(2 - layout.rank):
        push_pull("w", np.ones(2000, np.float32))
    """
    done = run_job(tmp_path, program, counts, SMALL)
    assert done.code == 3
    assert done.each("message") == {"worker0": says}


@pytest.mark.parametrize(("counts", "where"), [((2, 1, 1), "worker"), ((1, 2, 0), "local rank")])
def test_processes_that_disagree_about_a_key_are_told_so(counts, where, tmp_path):
    """The same key is two tensors: an error for all, no wrong sum."""
    done = run_job(tmp_path, 'push_pull("ab"[layout.rank], np.ones(20, np.float32))', counts)
    assert done.code == 3
    assert set(done.each("message")) == {"worker0", "worker1"}
    assert all("declare the same tensors" in message for message in done.each("message").values())
    assert any(where in message for message in done.each("message").values())


def test_long_names_do_not_hide_what_is_wrong(tmp_path):
    """An error has a few thousand bytes on its way to the workers; the names of tensors may have more."""
    done = run_job(tmp_path, 'push_pull("n" * 9000 + "ab"[layout.rank], np.ones(20, np.float32))', (2, 1, 1))
    assert done.code == 3
    assert set(done.each("message")) == {"worker0", "worker1"}
    assert all("declare the same tensors" in message for message in done.each("message").values())


def test_a_name_that_is_no_text_is_refused_by_itself(tmp_path):
    """Bytes that were decoded with surrogateescape cannot travel; the job goes on."""
    program = """
    try:
        push_pull("a" + chr(0xDC80), np.ones(4, np.float32))
    except ValueError as error:
        say(message=str(error))
    say(sum=push_pull("a", np.ones(4, np.float32)).tolist())
    """
    done = run_job(tmp_path, program, (2, 1, 1))
    assert done.code == 0, done.stderr
    said = "a tensor cannot be called 'a\\udc80': it cannot be written as UTF-8"
    assert set(done.each("message").values()) == {said}
    assert list(done.each("sum").values()) == [[2.0] * 4] * 2


COMING = """
from otel_dltrace.pushpull.store import Store
join = Store.join
def joins(*fields):
    join(*fields)
    open(os.path.join(OUT, "came"), "w").close()
Store.join = joins
"""


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        pytest.param("BYTEPS_LOCAL_SIZE", "1", "2", id="local ranks"),
        pytest.param("BYTEPS_KEY_HASH_FN", "djb2", "naive", id="hash"),
        pytest.param("BYTEPS_ENABLE_ASYNC", "0", "1", id="asynchronous"),
        pytest.param("DMLC_NUM_SERVER", "1", "2", id="servers"),
    ],
)
def test_workers_that_disagree_about_the_job_are_refused(name, first, second, tmp_path):
    """They would push and pull what is no mean, or wait for each other; who comes first is told, too."""
    program = f"""
    import time
    from otel_dltrace.pushpull.client import Servers
    while layout.worker and not os.path.exists(os.path.join(OUT, "came")):
        time.sleep(0.01)
    own = {{ {name!r}: {second!r} }} if layout.worker else {{}}
    told = []
    servers = Servers(*read_env(os.environ | own), told.append)
    servers.open()
    servers.close(str(told[0]))
    say(kind=type(told[0]).__name__, message=str(told[0]).partition("refuses us: ")[2])
    """
    done = run_job(tmp_path, program, (2, 1, 1), server=COMING, is_whole=True, grace_s=0.2)
    who = "the server" if name == "DMLC_NUM_SERVER" else "worker 0"
    says = f"worker 1 has {name}={second}, and {who} {name}={first}; give all the same value"
    assert done.each("kind") == {"worker0": "PeerLostError", "worker1": "MismatchError"}
    assert done.each("message") == {"worker0": says, "worker1": says}


def test_of_a_worker_that_does_not_come_no_other_is_to_blame(tmp_path):
    """A local rank that does not talk to servers waits for the one that does, which knows for whom it waits."""
    program = """
    import time
    import numpy as np
    from otel_dltrace.pushpull.engine import Engine
    from otel_dltrace.pushpull.errors import PushPullError
    while layout.worker:
        time.sleep(1)
    engine = Engine(layout, options)
    try:
        engine.start()
        engine.wait(engine.push_pull(engine.declare("w"), np.ones(1, np.float32), average=False))
    except PushPullError as error:
        say(message=str(error).partition(" server 0 ")[0])
        sys.exit(3)
    """
    done = run_job(tmp_path, program, (2, 2, 1), {"PUSHPULL_TIMEOUT": "8"}, is_whole=True, grace_s=2.0)
    assert done.each("message") == {f"worker{rank}": "not all workers came to" for rank in range(2)}
