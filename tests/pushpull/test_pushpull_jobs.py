"""push_pull jobs as real processes: sums over every layout, and what is observed of them."""

from pathlib import Path

import pytest

from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.stages import Q, stage_list
from tests.support.pushpull_jobs import ALONE, SERVED, SMALL, run_job

SWITCHES = {"BYTEPS_PCIE_SWITCH_SIZE": "2"}

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
