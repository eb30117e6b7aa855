"""push_pull jobs as real processes: sums over every layout, what is observed, and what happens when one dies."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.server import Server
from otel_dltrace.pushpull.stages import Q, stage_list
from otel_dltrace.pushpull.transport import credential, method, open_channel, pack_json, unpack_json
from tests.support.certificates import make_certificates
from tests.support.paths import ROOT
from tests.support.pushpull_jobs import run_job
from tests.support.servers import free_port, wait_until

SMALL = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_MIN_COMPRESS_BYTES": "0"}
SWITCHES = {"BYTEPS_PCIE_SWITCH_SIZE": "2"}
ALONE = {"BYTEPS_FORCE_DISTRIBUTED": "1"}

SUMS = """
def data(rank, round):
    numbers = np.random.default_rng([rank, round])
    kinds = {"float32": 9000, "float64": 1, "float16": 700, "int32": 4097, "uint8": 13, "int64": 512}
    return {kind: numbers.integers(0, 20, size).astype(kind) for kind, size in kinds.items()}
wrong = []
for round in range(3):
    mine = data(layout.rank, round)
    operations = [engine.push_pull(engine.declare(kind), values, average=False) for kind, values in mine.items()]
    for operation in operations:
        engine.wait(operation)
    for kind, values in mine.items():
        if not np.array_equal(values, sum(data(rank, round)[kind] for rank in range(layout.size))):
            wrong.append((kind, round))
mean = push_pull("mean", np.full(3, layout.rank, np.float32), average=True)
say(wrong=wrong, mean=mean.tolist(), folder=os.environ["PUSHPULL_DIR"])
"""


@pytest.mark.parametrize(
    ("counts", "env"),
    [
        pytest.param((1, 1, 0), {}, id="alone"),
        pytest.param((1, 1, 1), ALONE, id="one worker, one server"),
        pytest.param((2, 1, 1), {"BYTEPS_SCHEDULING_CREDIT": "2"}, id="two workers, with credit"),
        pytest.param((4, 1, 2), {}, id="four workers, two servers"),
        pytest.param((1, 3, 0), {}, id="three local ranks"),
        pytest.param((2, 3, 2), {"BYTEPS_KEY_HASH_FN": "naive"}, id="two workers of three local ranks"),
        pytest.param((1, 4, 0), SWITCHES, id="two switches of one machine"),
        pytest.param((2, 2, 1), {"BYTEPS_PCIE_SWITCH_SIZE": "1"}, id="a switch for each local rank"),
    ],
)
def test_all_ranks_get_the_sum(counts, env, tmp_path):
    """Over every layout, for every type, partitioned or not, round after round; nothing is left in shared memory."""
    done = run_job(tmp_path, SUMS, counts, {**SMALL, **env})
    size = counts[0] * counts[1]
    assert (done.code, done.stderr) == (0, "")
    assert list(done.each("wrong").values()) == [[]] * size
    assert list(done.each("mean").values()) == [[(size - 1) / 2] * 3] * size
    assert [folder for folder in done.each("folder").values() if Path(folder).parent.exists()] == []


WATCHED = """
class Watch:
    follows_stages = True
    def __init__(self):
        self.told, self.stages, self.sizes, self.waits = [], {}, set(), 0
    def push_pull_started(self, name, declared_key, round_, nbytes, dtype, start):
        self.told.append(["started", name, declared_key, round_, nbytes, dtype])
        return self
    def request_sending(self, partition):
        return {}
    def stage_finished(self, partition, queue, nbytes, server, enqueued, started, end):
        assert enqueued <= started <= end
        assert (server == 0) == (queue.name in ("PUSH", "PULL"))
        self.stages.setdefault(partition, []).append(queue.name)
        self.sizes.add(nbytes)
    def completed(self, end, error):
        self.told.append(["completed", error])
    def waited(self, start, end):
        self.waits += start <= end
watch = Watch()
trace.observe(watch)
values = push_pull("w", np.ones(3000, np.float32), compressor=Fp16())
trace.observe(None)
say(
    stages=[watch.stages[partition] for partition in sorted(watch.stages)],
    sizes=sorted(watch.sizes), told=watch.told, sum=float(values[-1]),
)
assert watch.waits in (0, 1)  # it was done already, or not
"""


def test_every_queue_type_is_observed_in_its_order(tmp_path):
    """One worker with four local ranks on two switches, a server and a compressor: all twelve, per partition."""
    done = run_job(tmp_path, WATCHED, (1, 4, 1), {**SMALL, **SWITCHES, **ALONE})
    assert (done.code, done.stderr) == (0, "")
    seen = set()
    for rank in range(4):
        said = done.said[f"worker{rank}"][0]
        layout = Layout(0, 1, rank, 4, 1, 2, force_distributed=True)
        expected = [queue.name for queue in stage_list(layout, compressed=True)]
        assert said == {
            "stages": [expected],
            "sizes": [12000],
            "told": [["started", "w", 0, 0, 12000, "float32"], ["completed", None]],
            "sum": 4.0,
        }
        seen |= set(expected)
    assert seen == {queue.name for queue in Q}


FAILING = """
from otel_dltrace.pushpull.errors import PeerLostError
class Watch:
    follows_stages = True
    def push_pull_started(self, *told):
        if told[0] == "w":
            engine.fail(PeerLostError("worker 1: it is gone"))
        return self
    def stage_finished(self, *told):
        pass
    def completed(self, end, error):
        say(error=type(error).__name__)
    def waited(self, start, end):
        pass
trace.observe(Watch())
push_pull("w", np.ones(2000, np.float32))
"""


def test_a_push_pull_that_begins_as_the_job_fails_is_seen_to_end(tmp_path):
    """Its end is told once, with the error, whoever is first."""
    done = run_job(tmp_path, FAILING, (1, 1, 0), SMALL)
    raised = {"error": "PeerLostError", "message": "worker 1: it is gone"}
    assert done.said["worker0"] == [{"error": "PeerLostError"}, raised]


REQUESTS = """
import time
class Sends:
    follows_stages = False
    def push_pull_started(self, *told):
        return self
    def request_sending(self, partition):
        return {"traceparent": f"{partition}-{layout.worker}"}
    def waited(self, *told):
        pass
    completed = waited
trace.observe(Sends())
while layout.worker and len([name for name in os.listdir(OUT) if name.startswith("pulling")]) < 2:
    time.sleep(0.01)
push_pull("w", np.ones(2000, np.float32))
"""
SERVED = """
import time
from otel_dltrace.pushpull.store import Store
pushed, push, pull = {}, Store.push, Store.pull
def pushing(store, request, values):
    pushed[request.key] = time.monotonic_ns()
    return push(store, request, values)
def pulling(store, request):
    open(os.path.join(OUT, f"pulling-{request.key}"), "w").close()
    return pull(store, request)
Store.push, Store.pull = pushing, pulling
class Requests:
    def request_answered(self, kind, request, metadata, start, waited, end, error):
        say(
            kind=kind, key=request.key, name=request.name, rank=request.rank, worker=request.worker,
            nbytes=request.nbytes, waited=start < pushed[request.key] <= start + waited <= end,
            traceparent=metadata["traceparent"], secret="authorization" in metadata, error=error and repr(error),
        )
trace.observe(Requests())
"""


def test_a_server_observes_requests_with_what_the_worker_sent_along(tmp_path):
    """A push and a pull for each worker and key; who came first waits for the one who came last."""
    done = run_job(tmp_path, REQUESTS, (2, 1, 1), SMALL, server=SERVED)
    assert (done.code, done.stderr) == (0, "")
    said = sorted(done.said["server0"], key=lambda line: (line["kind"], line["key"], line["rank"]))
    assert said == [
        {
            "kind": kind,
            "key": key,
            "name": "w",
            "rank": rank,
            "worker": rank,
            "nbytes": size,
            "waited": kind == "pull" and rank == 0,
            "traceparent": f"{key}-{rank}",
            "secret": False,
            "error": None,
        }
        for kind in ("pull", "push")
        for key, size in ((0, 4096), (1, 3904))
        for rank in (0, 1)
    ]


IN_VAIN = """
import time
if layout.worker:
    while not os.path.exists(os.path.join(OUT, "waits")):
        time.sleep(0.01)
    os.kill({killed}, signal.SIGKILL)
    while engine.error is None:
        time.sleep(0.01)
else:
    with open(os.path.join(OUT, "pid"), "w") as file:
        file.write(str(os.getpid()))
push_pull("w", np.ones(2, np.float32))
"""
SERVED_IN_VAIN = """
from otel_dltrace.pushpull.store import Store
pull = Store.pull
def pulling(store, request):
    open(os.path.join(OUT, "waits"), "w").close()
    return pull(store, request)
Store.pull = pulling
class Requests:
    def request_answered(self, kind, request, metadata, start, waited, end, error):
        if kind == "pull":
            say(waited=waited > 0, error=type(error).__name__)
trace.observe(Requests())
"""
OTHER, ITSELF = "os.getpid()", 'int(open(os.path.join(OUT, "pid")).read())'


@pytest.mark.parametrize(
    "killed", [pytest.param(OTHER, id="the other dies"), pytest.param(ITSELF, id="who waits dies")]
)
def test_a_pull_that_waits_in_vain_is_told_to_have_waited(killed, tmp_path):
    """It would seem to take so long to send, and to have been answered."""
    done = run_job(tmp_path, IN_VAIN.format(killed=killed), (2, 1, 1), SMALL, server=SERVED_IN_VAIN)
    assert done.said["server0"] == [{"waited": True, "error": "PeerLostError"}]


def test_compressed_sums_are_close_and_top_k_forgets_nothing(tmp_path):
    """Half precision is near at once; of top-k the rounds add up to what was pushed, but for what is left over."""
    program = """
    half = push_pull("half", np.linspace(-1, 1, 3000, dtype=np.float32), compressor=Fp16())
    say(half=float(np.abs(half - layout.size * np.linspace(-1, 1, 3000)).max()))
    total = np.zeros(3000, np.float32)
    for round in range(40):
        total += push_pull("top", np.linspace(-1, 1, 3000, dtype=np.float32), compressor=TopK(0.1))
    say(top=float(np.abs(total / 40 - layout.size * np.linspace(-1, 1, 3000)).max()))
    """
    done = run_job(tmp_path, program, (2, 1, 1), SMALL)
    assert (done.code, done.stderr) == (0, "")
    assert max(done.each("half").values()) < 4e-3
    assert max(done.each("top").values()) < 0.7


@pytest.mark.parametrize(
    ("counts", "env"),
    [
        pytest.param((2, 3, 2), {}, id="three local ranks"),
        pytest.param((2, 4, 1), SWITCHES, id="two switches"),
    ],
)
def test_what_is_compressed_is_the_sum_of_all_local_ranks(counts, env, tmp_path):
    """The root packs no partition before the others' shares of it are there, in no round; nor without a compressor."""
    program = """
    def data(rank, round):
        return np.random.default_rng([rank, round]).integers(0, 200, 9000).astype(np.float32)
    wrong, kinds = [], {"half": Fp16(), "all": TopK(1.0), "plain": None}
    for round in range(8):
        whole = sum(data(rank, round) for rank in range(layout.size))
        for name, compressor in kinds.items():
            values = push_pull(name, data(layout.rank, round), compressor=compressor)
            if not np.array_equal(values, whole):
                wrong.append((name, round))
    say(wrong=wrong)
    """
    done = run_job(tmp_path, program, counts, {**SMALL, **env})
    assert (done.code, done.stderr) == (0, "")
    assert list(done.each("wrong").values()) == [[]] * (counts[0] * counts[1])


@pytest.mark.parametrize(
    "counts", [pytest.param((2, 2, 2), id="two servers"), pytest.param((1, 2, 0), id="one worker, no server")]
)
def test_an_asynchronous_value_collects_what_all_add(counts, tmp_path):
    """Nobody waits for the other workers; in the end every push has been added once."""
    program = """
    weights = np.full(2000, 10, np.float32)
    for round in range(5):
        old, delta = weights.copy(), np.ones(2000, np.float32)
        operation = engine.push_pull(engine.declare("w"), delta, average=False, initial=old)
        engine.wait(operation)
        weights = delta
    push_pull("all are here", np.zeros(1, np.float32))
    delta = np.zeros(2000, np.float32)
    engine.wait(engine.push_pull(engine.declare("w"), delta, average=False, initial=weights))
    say(weights=sorted(set(delta.tolist())))
    """
    done = run_job(tmp_path, program, counts, SMALL)
    ranks = counts[0] * counts[1]
    assert (done.code, done.stderr) == (0, "")
    assert list(done.each("weights").values()) == [[10.0 + 5 * ranks]] * ranks


def test_a_job_may_be_idle_for_longer_than_its_servers_are_asked_whether_they_live(tmp_path):
    """With a short timeout they are asked each second, and take it from nobody amiss."""
    program = """
    import time
    from pathlib import Path
    import numpy as np
    from otel_dltrace.pushpull.engine import Engine
    Path(OUT, f"worker{layout.rank}").touch()
    while len([*Path(OUT).iterdir()]) < 3:  # a busy machine takes longer than the timeout to get them here
        time.sleep(0.01)
    engine = Engine(layout, options)
    engine.start()
    for pause in (7, 0):
        values = np.ones(1, np.float32)
        engine.wait(engine.push_pull(engine.declare("w"), values, average=False))
        time.sleep(pause)
    say(sum=values.tolist())
    engine.stop()
    """
    server = 'open(os.path.join(OUT, "server"), "w").close()'
    done = run_job(tmp_path, program, (2, 1, 1), {"PUSHPULL_TIMEOUT": "4"}, server=server, is_whole=True)
    assert (done.code, done.stderr) == (0, "")
    assert list(done.each("sum").values()) == [[2.0]] * 2


def test_thousands_of_partitions_may_be_under_way(tmp_path):
    """A server takes all that come at once, however slowly it gets to them."""
    program = """
    values = push_pull("w", np.ones(4000 * 1024, np.float32))
    say(sums=sorted(set(values.tolist())))
    """
    done = run_job(tmp_path, program, (2, 1, 1), SMALL)
    assert (done.code, done.stderr) == (0, "")
    assert list(done.each("sums").values()) == [[2.0]] * 2


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
    said = "a tensor cannot be called 'a\\udc80': there is half a character in it"
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


SERVE = [sys.executable, "-m", "otel_dltrace", "pushpull", "serve"]
STRANGER = """
import os
from otel_dltrace.pushpull.engine import Engine
from otel_dltrace.pushpull.errors import PushPullError
from otel_dltrace.pushpull.options import read_env
try:
    engine = Engine(*read_env(os.environ))
    engine.start()
    engine.stop()
    print("in")
except PushPullError as error:
    print(error)
"""


def beside_a_server(server: dict[str, str], worker: dict[str, str], program: str = STRANGER) -> str:
    """Return what a worker says that meets one server; the server ends with it, or is ended."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "BYTEPS_FORCE_DISTRIBUTED": "1",
        "PUSHPULL_TOKEN": "right",
        "PUSHPULL_TIMEOUT": "120",
    }
    with subprocess.Popen(SERVE, env=env | server) as serving:
        try:
            asked = subprocess.run(
                [sys.executable, "-c", program],
                env=env | worker,
                capture_output=True,
                text=True,
                timeout=240,
                check=True,
            )
        finally:
            serving.terminate()
    return asked.stdout.strip()


def test_a_server_that_does_not_come_ends_the_job():
    """Worker and server 0 wait for it, the worker says which one it is, and neither is left behind."""
    counts = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "BYTEPS_FORCE_DISTRIBUTED": "1", "PUSHPULL_TOKEN": "one"}
    ours = {"PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": str(free_port()), "PUSHPULL_TIMEOUT": "5"}
    env = {**os.environ, **counts, **ours, "DMLC_SERVER_ID": "0"}
    with subprocess.Popen(SERVE, env=env) as first:
        try:
            wait_until(lambda: answers(int(env["DMLC_PS_ROOT_PORT"])), what="server 0")
            command = [sys.executable, "-c", STRANGER]
            worker = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)
            code = first.wait(60)
        finally:
            first.terminate()
    assert (worker.stdout, code) == ("server 1 did not come to server 0 within 5 s\n", 0)


def test_a_worker_that_comes_to_a_job_that_has_failed_opens_its_session():
    """It is told there; a server waits for one that has not come for as long as `PUSHPULL_TIMEOUT`."""
    first = Server(Layout(num_servers=1), Options(token="one"))
    first.addresses[0] = "10.0.0.2:9000"
    first.store.fail("worker 0: it was killed")
    assert asyncio.run(first._servers(b"", {})) == pack_json(addresses=["10.0.0.2:9000"])


def test_workers_that_come_to_a_job_that_has_failed_are_told_why():
    """Whatever they ask which server when they learn of it."""
    counts = {"DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "3", "BYTEPS_FORCE_DISTRIBUTED": "1", "PUSHPULL_TOKEN": "one"}
    ours = {"PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": str(free_port()), "PUSHPULL_TIMEOUT": "120"}
    env = {**os.environ, **counts, **ours}
    with ExitStack() as running:

        def start(command: list[str], **more: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(command, env=env | more, stdout=subprocess.PIPE, text=True)
            running.enter_context(process)
            running.callback(process.kill)
            return process

        for number in range(3):
            start(SERVE, DMLC_SERVER_ID=str(number))
        fail_all(f"127.0.0.1:{env['DMLC_PS_ROOT_PORT']}", "it was killed")
        late = [start([sys.executable, "-c", STRANGER], DMLC_WORKER_ID=str(number)) for number in (1, 2, 3)]
        told = [worker.communicate(timeout=240)[0] for worker in late]
    assert told == ["worker 0: it was killed\n"] * 3


def fail_all(root: str, why: str) -> None:
    """Take the word of worker 0 to all servers, once they have come, that it cannot go on."""
    options = Options(token="one")

    def call(address: str, name: str, body: bytes) -> bytes:
        with open_channel(address, options) as channel:
            return channel.unary_unary(method(name))(body, metadata=[credential(options)], wait_for_ready=True)

    for address in unpack_json(call(root, "Servers", b""), addresses=list)["addresses"]:
        call(address, "Leave", pack_json(worker=0, session="a", reason=why))


def test_a_stranger_is_refused():
    """Without the job's token nothing is answered."""
    says = beside_a_server({}, {"PUSHPULL_TOKEN": "wrong"})
    assert "refuses us: the token is not this job's; is PUSHPULL_TOKEN the same everywhere?" in says


@pytest.mark.parametrize(
    ("name", "body", "code", "says"),
    [
        pytest.param(
            "Session", b"{", "INVALID_ARGUMENT", "b'{' is not a JSON object with worker (int), ", id="no json"
        ),
        pytest.param("Session", b"\xff", "INVALID_ARGUMENT", "b'\\xff' is not a JSON object", id="no text"),
        pytest.param("Session", b"[" * 9999, "INVALID_ARGUMENT", "[[[' is not a JSON object with", id="deep"),
        pytest.param("Session", b'{"worker": 0}', "INVALID_ARGUMENT", "num_workers (int), agreed (dict);", id="fields"),
        pytest.param(
            "Session",
            b'{"worker": -1, "session": "", "num_workers": 1, "agreed": {}}',
            "FAILED_PRECONDITION",
            "worker -1 of 1 came, the server's job has 1",
            id="rank below 0",
        ),
        pytest.param("Leave", b"{}", "INVALID_ARGUMENT", "worker (int), session (str), reason (str);", id="leave"),
        pytest.param("Register", b'{"server": Infinity}', "INVALID_ARGUMENT", "server (int), address (str);", id="inf"),
        pytest.param(
            "Register",
            b'{"server": -1, "address": "h:1"}',
            "INVALID_ARGUMENT",
            "server -1 came, server 0's job has 1",
            id="server below 0",
        ),
    ],
)
def test_a_body_that_is_none_of_ours_is_answered_in_a_sentence(name, body, code, says):
    """Whoever has the token may still be of another release; the server goes on."""
    asks = f"""
import os
import grpc
from otel_dltrace.pushpull.contact import greet
from otel_dltrace.pushpull.options import read_env
from otel_dltrace.pushpull.transport import credential, method, open_channel
_, options = read_env(os.environ)
with open_channel(options.root, options) as channel:
    greet(channel, "it", options)
    kind = channel.unary_unary if {name!r} == "Leave" else channel.unary_stream
    call = kind(method({name!r}))
    try:
        list(call({body!r}, metadata=(credential(options),), timeout=20))
    except grpc.RpcError as error:
        print(error.code().name, error.details())
    greet(channel, "it", options)
"""
    answer, _, sentence = beside_a_server({}, {}, asks).partition(" ")
    assert answer == code
    assert says in sentence


def test_a_namesake_that_is_refused_ends_no_job(tmp_path):
    """Its goodbye is its own, not that of the worker whose number it has."""
    program = """
    from otel_dltrace.pushpull.client import Servers
    push_pull("w", np.ones(1, np.float32))
    told = []
    twin = Servers(layout, options, told.append)
    twin.open()
    twin.close(str(told[0]))
    say(told=str(told[0]).partition("refuses us: ")[2], sum=push_pull("w", np.ones(1, np.float32)).tolist())
    """
    done = run_job(tmp_path, program, (2, 1, 1))
    assert (done.code, done.stderr) == (0, "")
    own = "does each have its own DMLC_WORKER_ID?"
    assert list(done.each("told").values()) == [f"worker {worker} is here already; {own}" for worker in range(2)]
    assert list(done.each("sum").values()) == [[2.0]] * 2


def test_a_goodbye_while_the_servers_are_met_raises_nothing():
    """The job fails, and so it is said on another thread, just when the worker calls a server: it hangs up."""
    program = """
import os
from otel_dltrace.pushpull import client
from otel_dltrace.pushpull.options import read_env
meet, told = client.greet, []
def greet(channel, where, options, *given_up):
    meet(channel, where, options)
    if given_up:
        channel.close()
client.greet = greet
servers = client.Servers(*read_env(os.environ), told.append)
try:
    servers.open()
except ValueError:  # gRPC's; the engine says why the job failed
    servers.close("local rank 0 of worker 0 died or was killed")
    print(told)
"""
    assert beside_a_server({}, {}, program) == "[]"


def test_a_port_has_one_server():
    """The second one says that it is taken: it would get some of the first one's workers, and refuse them."""
    counts = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"}
    env = {**os.environ, **counts, "PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": str(free_port())}
    with subprocess.Popen(SERVE, env=env | {"PUSHPULL_TOKEN": "first"}) as first:
        try:
            wait_until(lambda: answers(int(env["DMLC_PS_ROOT_PORT"])), what="the first server")
            second = subprocess.run(
                SERVE, env=env | {"PUSHPULL_TOKEN": "second"}, capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            first.terminate()
    assert second.returncode == 2
    assert "is the port taken, or 127.0.0.1 (DMLC_NODE_HOST) not an address of this host?" in second.stderr


def test_a_server_asked_to_listen_elsewhere_says_so():
    """A port that it takes wherever there is room is not taken: the address is none of this host."""
    counts = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "DMLC_SERVER_ID": "1", "PUSHPULL_TOKEN": "x"}
    env = {**os.environ, **counts, "PYTHONPATH": str(ROOT), "DMLC_NODE_HOST": "192.0.2.1"}  # RFC 5737: nobody's
    done = subprocess.run(SERVE, env=env, capture_output=True, text=True, timeout=60, check=False)
    says = "server 1 cannot listen at 192.0.2.1:0; is 192.0.2.1 (DMLC_NODE_HOST) not an address of this host?"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"otel-dltrace: {says}")


def test_a_server_does_not_wait_for_ever_for_who_never_comes():
    """Once the job has failed the timeout is enough: a worker that crashed before its `init` would keep it up."""
    port = free_port()
    counts = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_PORT": str(port), "PUSHPULL_TOKEN": "x"}
    env = {**os.environ, **counts, "PYTHONPATH": str(ROOT), "PUSHPULL_TIMEOUT": "4"}
    with subprocess.Popen(SERVE, env=env | {"PUSHPULL_TIMEOUT": "1"}) as serving:
        try:
            wait_until(lambda: answers(port), what="the server")
            came = subprocess.run(
                [sys.executable, "-c", STRANGER], env=env, capture_output=True, text=True, timeout=240, check=True
            )
            assert serving.wait(60) == 0
        finally:
            serving.kill()
    assert came.stdout == f"not all workers came to server 0 at 127.0.0.1:{port} in 4 s\n"


def answers(port: int) -> bool:
    """Return whether somebody listens at *port*."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_can_talk_over_tls(tmp_path, tmp_path_factory):
    """With a certificate for each side a worker gets in; without one, or with one of somebody else, it does not."""
    made = make_certificates(tmp_path)
    ca = {"PUSHPULL_TLS_CA": made.authority}
    server = {**ca, "PUSHPULL_TLS_CERT": made.server, "PUSHPULL_TLS_KEY": made.server_key}
    worker = {**ca, "PUSHPULL_TLS_CERT": made.client, "PUSHPULL_TLS_KEY": made.client_key}
    assert beside_a_server(server, worker) == "in"
    plain = beside_a_server(server, {"PUSHPULL_TIMEOUT": "1"})
    assert plain.startswith("the server at 127.0.0.1:")
    other = make_certificates(tmp_path_factory.mktemp("other"))
    distrusting = beside_a_server(server, {**worker, "PUSHPULL_TLS_CA": other.authority, "PUSHPULL_TIMEOUT": "200"})
    assert "CERTIFICATE_VERIFY_FAILED" in distrusting, "said at once, not after the timeout"
