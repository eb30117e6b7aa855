"""The report by key: a planted delay is found from the workers and from the servers, for each key and partition."""

import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest
from rich.console import Console

from otel_dltrace.analysis.push_pulls.keys import Keys, RankArrivals, keys
from otel_dltrace.analysis.push_pulls.last_comers import Last
from otel_dltrace.analysis.push_pulls.slow_server import SlowServer
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.cli.main import main
from otel_dltrace.model import semconv as s
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.json import to_json
from otel_dltrace.report.keys import sentences, write_keys
from tests.support.byteps_files import unpack
from tests.support.runs import MS, Rank

TENSORS = ("conv.weight", "fc.weight")
STEPS, PARTITIONS = 10, 2


def pushed(late: float = 30.0, slow_partition: float = 4.0, prefix: str = "") -> list[SpanBatch]:
    """Return two workers and a server; worker 1 begins *late* ms later, a tensor's last partition takes longer."""
    workers = [Rank(rank, 2) for rank in range(2)]
    server = Rank(0, 2, role="server", nonce=9).add(Descriptor(s.PHASE, s.GC), 0, 0, 1)  # which is no request
    for step in range(STEPS):
        for declared, tensor in enumerate(prefix + name for name in TENSORS):
            begins = [step * 200.0 + declared * 50 + rank * late for rank in range(2)]
            for rank, (worker, begin) in enumerate(zip(workers, begins, strict=True)):
                end = max(begins) + 10 + slow_partition
                operation = Descriptor(s.COLLECTIVE, s.PUSH_PULL, backend="byteps", tensor=tensor, key=declared)
                worker.add(operation, step, begin, end, seq=step + 1, level=Level.COLLECTIVE, b=-1)
                for partition in range(PARTITIONS):
                    slower = slow_partition * partition
                    pull = (max(begins) + 4, max(begins) + 6 + slower)
                    _stage(worker, tensor, declared, partition, step, "PUSH", begin + 1, begin + 3, wait=1)
                    _stage(worker, tensor, declared, partition, step, "PULL", *pull, wait=pull[0] - begin - 3)
                    for name, at, over, wait in (
                        ("push", begin + 2, begin + 3, 0),
                        ("pull", begin + 4, pull[1], max(begins) - begin),
                    ):
                        request = Descriptor(s.PHASE, name, tensor=tensor, key=declared)
                        fields = {"a": round(wait * 1000), "b": rank, "level": Level.PARTITION, "partition": partition}
                        server.add(request, step, at, over, seq=step + 1, **fields)
    return [worker.batch() for worker in (*workers, server)]


def _stage(
    rank: Rank, tensor: str, key: int, partition: int, step: int, name: str, begin: float, end: float, wait: float
):
    d = Descriptor(s.PHASE, name, backend="byteps", tensor=tensor, key=key, queue_type=name)
    rank.add(d, step, begin, end, seq=step + 1, partition=partition, a=round(wait * 1000), level=Level.PARTITION, b=-1)


def spread_of(count: int, ms: float) -> Spread:
    ns = round(ms * MS)
    return Spread(count, count * ns, ns, ns, ns, ns)


def each_late(times: int) -> Last:
    """Return what is told of worker 1 where it came last each of *times*, by 30 ms."""
    return Last(1, times, times, 30 * MS, times * 30 * MS, 30 * MS)


def test_a_planted_delay_is_named_by_workers_and_by_servers():
    """Worker 1 comes last by the 30 ms that were planted, to every push_pull and with every push."""
    found = keys(pushed())
    pushes = STEPS * len(TENSORS)

    assert found.ranks == (
        RankArrivals(0, Last(0, 0, pushes, 0, 0, 0), Last(0, 0, 2 * pushes, 0, 0, 0)),
        RankArrivals(1, each_late(pushes), each_late(2 * pushes)),
    )
    assert {key.last for key in found.workers} == {each_late(STEPS)}
    assert {key.last for key in found.servers} == {each_late(STEPS)}


def test_nobody_comes_last_where_servers_answer_at_once():
    """Workers of an asynchronous job may be steps apart: that is neither lateness nor gathering."""
    found = keys(pushed(prefix=s.ASYNC_PARAM))

    assert found.ranks == ()
    assert {key.last for key in (*found.workers, *found.servers)} == {None}
    assert [key.gather for key in found.servers] == [Spread()] * (len(TENSORS) * PARTITIONS)


def test_a_key_is_told_by_stage_and_partition():
    """What the workers saw of a tensor: how long it took, each stage and its queue, the partition that took longest."""
    (key, _) = sorted(keys(pushed(late=0)).workers, key=lambda key: key.key)

    assert (key.key, key.tensor, key.partitions, key.time) == (0, "conv.weight", 2, spread_of(20, 14))
    assert [(stage.name, stage.wait) for stage in key.stages] == [
        ("PUSH", spread_of(40, 1)),
        ("PULL", spread_of(40, 1)),
    ]
    assert [stage.time.p50 for stage in key.stages] == [2 * MS, 4 * MS]
    assert (key.slowest.partition, key.slowest.time, key.slowest.others) == (1, spread_of(20, 10), 6 * MS)
    assert key.last is None


def test_a_key_is_longest_where_the_servers_are_asked():
    """A rank that waits for another of its worker waits in its next stage, and for what that one does."""
    roots = pushed(late=0)[:2]
    other = Rank(2, 3)
    for step in range(STEPS):
        begin = step * 200.0
        _stage(other, "conv.weight", 0, 0, step, "COPYH2D", begin + 40, begin + 41, wait=39)
    both = next(key for key in keys([*roots, other.batch()]).workers if key.key == 0)
    alone = next(key for key in keys(roots).workers if key.key == 0)

    assert (both.longest, both.longest.name) == (alone.longest, "PULL")
    assert {stage.name for stage in both.stages} == {"PUSH", "PULL", "COPYH2D"}


def test_what_takes_longest_does_so_by_median():
    """One slow first step makes neither its key nor its stage the longest, nor does one broadcast before it."""
    worker, server = Rank(0, 2), Rank(0, 2, role="server", nonce=9)
    broadcast = Descriptor(s.COLLECTIVE, s.PUSH_PULL, backend="byteps", tensor="parameter", key=2)
    worker.add(broadcast, 0, 0, 20, seq=1, level=Level.COLLECTIVE, b=1)
    for step in range(STEPS):
        slow = 900.0 if step == 0 else 0.0
        for declared, (tensor, push) in enumerate((("fc.weight", 3.0), ("conv.weight", 1.0))):
            begin = step * 2000.0
            late = slow * declared
            operation = Descriptor(s.COLLECTIVE, s.PUSH_PULL, backend="byteps", tensor=tensor, key=declared)
            pulls = (begin + push + 0.5, begin + push + 1.5 + late)
            worker.add(operation, step, begin, pulls[1], seq=step + 1, level=Level.COLLECTIVE, b=-1)
            _stage(worker, tensor, declared, 0, step, "PUSH", begin, begin + push, wait=0)
            _stage(worker, tensor, declared, 0, step, "PULL", *pulls, wait=0.5 + slow)
            request = Descriptor(s.PHASE, "pull", tensor=tensor, key=declared)
            server.add(request, step, begin, begin + push + late, seq=step + 1, b=0, level=Level.PARTITION)
    found = keys([worker.batch(), server.batch()])

    assert [(key.tensor, key.longest and key.longest.name) for key in found.workers] == [
        ("fc.weight", "PUSH"),
        ("conv.weight", "PULL"),
        ("parameter", None),
    ]
    assert [key.tensor for key in found.servers] == ["fc.weight", "conv.weight"]


def test_a_server_tells_waiting_from_transfer():
    """The first worker's pull waits until the last one's push is in; the last one's does not; the rest is transfer."""
    key = next(key for key in keys(pushed()).servers if key.key == (1 << 16 | 1))

    assert (key.server, key.tensor, key.partition) == (0, "fc.weight", 1)
    assert (key.gather, key.push) == (spread_of(STEPS, 30), spread_of(2 * STEPS, 1))
    assert (key.wait, key.transfer.p50) == (spread_of(STEPS, 30), 6 * MS)


def pushed_to_two(worker: float = 0.0, tensor: float = 0.0, server: float = 0.0) -> list[SpanBatch]:
    """Return what two servers of ours saw of two workers, 1 ms apart: a *worker*, a *tensor*, a *server* is that slow.

    Each server keeps two tensors, takes 0.1 ms for a push, and does one after the other, as the pushes come.
    """
    servers = [Rank(number, 2, role="server", nonce=9 + number) for number in range(2)]
    for step in range(STEPS):
        for number, keeps in enumerate(servers):
            came = [
                (step * 500.0 + 100 * place + rank * (1 + worker + tensor * (number == place == 1)), rank, place)
                for rank in range(2)
                for place in range(2)
            ]
            free = 0.0
            for at, rank, place in sorted(came):
                begin = max(at, free + 0.05)
                free = begin + 0.1 + server * number
                key = 2 * number + place
                request = Descriptor(s.PHASE, s.PUSH, backend="pushpull", tensor=f"t{key}", key=key)
                fields = {"b": rank, "level": Level.PARTITION, "size": 4096 + key}
                keeps.add(request, step, begin, free, seq=step + 1, **fields)
    return [server.batch() for server in servers]


@pytest.mark.parametrize(
    ("planted", "by", "slow_server", "late_keys"),
    [
        pytest.param({}, 1, None, set(), id="nothing"),
        pytest.param({"worker": 30}, 31, None, {"t0", "t1", "t2", "t3"}, id="worker"),
        pytest.param({"tensor": 30}, 1, None, {"t3"}, id="tensor"),
        pytest.param(
            {"server": 30}, 1, SlowServer(1, 4 * STEPS, round(30.1 * MS), round(0.1 * MS)), set(), id="server"
        ),
    ],
)
def test_a_slow_worker_tensor_or_server_is_told_from_the_others(planted, by, slow_server, late_keys):
    """A push that waits behind another one is not late, and the server that it waits for is named."""
    found = keys(pushed_to_two(**planted))
    last = found.ranks[1].servers

    assert found.slow_server == slow_server
    assert -(-last.late // MS) == by
    assert {key.tensor for key in found.servers if key.last and key.last.late > 20 * MS} == late_keys


Push = tuple[int, float, int]
"""Server, ms, bytes."""


def slow_among(pushes: Iterable[Push]) -> SlowServer | None:
    """Return the slow server of *pushes*, in any order."""
    servers = defaultdict[int, Rank](lambda: Rank(0, 2, role="server"))
    for at, (number, ms, size) in enumerate(pushes):
        if number not in servers:
            servers[number] = Rank(number, 2, role="server", nonce=9 + number)
        request = Descriptor(s.PHASE, s.PUSH, backend="pushpull", tensor=f"t{number}", key=number)
        fields = {"seq": at, "b": 0, "level": Level.PARTITION, "size": size}
        servers[number].add(request, 0, 100.0 * at, 100.0 * at + ms, **fields)
    return keys([server.batch() for server in servers.values()]).slow_server


@pytest.mark.parametrize(
    ("own", "others", "is_told"),
    [
        pytest.param(1, 1, False, id="one each"),
        pytest.param(4, 9, False, id="few of its own"),
        pytest.param(9, 4, False, id="few of the others"),
        pytest.param(5, 5, True, id="enough"),
    ],
)
def test_a_slow_server_is_not_told_from_a_few_pushes(own, others, is_told):
    """One that was held up by something else is no median."""
    pushes = [(0, 5.0, 4096)] * own + [(1, 0.001, 4096)] * others
    assert slow_among(pushes) == (SlowServer(0, own, 5 * MS, 1000) if is_told else None)


def test_servers_are_compared_by_pushes_as_large():
    """In whatever order they come; what the others have no, or few, pushes of as well counts for nobody.

    No network takes long for a small one: a layer's bias is as large as its weights.
    """
    small = [(server, 4.0 if server == 3 else 1.0, 64 << 3 * server) for server in (3, 0, 2, 1)]
    large = [(server, 60.0 if server == 3 else 20.0, 90_000 - server) for server in (1, 3)]
    alone = [(0, 90.0, 1 << 20), (1, 1.0, 1 << 20)]
    pushes = [*(small + large) * 6, *alone * 2, *alone[:1] * 9]
    assert slow_among(pushes) == SlowServer(3, 12, 32 * MS, round(10.5 * MS))


def test_larger_pushes_to_the_others_hide_nothing():
    """They are asked where there are none as large."""
    pushes = [(0, 1.0, 1 << 17), (1, 11.0, 1 << 17), (1, 11.0, 1 << 18), (0, 100.0, 1 << 27)]
    assert slow_among(pushes * 6) == SlowServer(1, 6, 11 * MS, 1 * MS)


def test_the_slow_server_is_said():
    """With how long others take for the same."""
    says = "Server 1 takes 30.1 ms (p50) to add a push, the others 0.10 ms for pushes of such a size or larger."
    assert says in sentences(keys(pushed_to_two(server=30)))


def pushed_by_two(
    stalled: float = 0.0, queued: float = 0.0, adds: float = 0.0, larger: int = 0, steps: int = STEPS
) -> list[SpanBatch]:
    """Return what two workers and two servers saw: server 1 is *stalled* before each first push of a worker's.

    Each server keeps two tensors. The second push of a worker to server 1 is *queued* behind the first, and each there
    is added in so many ms more. What server 0 keeps is so many bytes *larger*.
    """
    workers = [Rank(rank, 2) for rank in range(2)]
    servers = [Rank(number, 2, role="server", nonce=9 + number) for number in range(2)]
    for step in range(steps):
        for key in range(4):
            number, place = divmod(key, 2)
            takes = 1 + number * (queued if place else stalled)
            for rank, worker in enumerate(workers):
                begin = step * 500.0 + key * 100 + rank
                fields = {"seq": step + 1, "level": Level.PARTITION, "size": 4096 + key + larger * (1 - number)}
                stage = Descriptor(s.PHASE, "PUSH", backend="pushpull", tensor=f"t{key}", key=key, queue_type="PUSH")
                worker.add(stage, step, begin, begin + takes + number * adds, b=-1, **fields)
                request = Descriptor(s.PHASE, s.PUSH, backend="pushpull", tensor=f"t{key}", key=key)
                servers[number].add(request, step, begin + takes, begin + takes + number * adds, b=rank, **fields)
    return [one.batch() for one in (*workers, *servers)]


@pytest.mark.parametrize(
    ("planted", "slow_way"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param({"stalled": 40}, SlowServer(1, 2 * STEPS, 41 * MS, 1 * MS), id="it stands still"),
        pytest.param(
            {"stalled": 40, "larger": 100_000},
            SlowServer(1, 2 * STEPS, 41 * MS, 1 * MS),
            id="it stands still, and the others' pushes are larger",
        ),
        pytest.param({"stalled": 40, "larger": -4000}, None, id="40 times as many bytes go to it"),
        pytest.param({"stalled": 40, "steps": 2}, None, id="twice"),
        pytest.param({"queued": 40}, None, id="one push behind another"),
        pytest.param({"adds": 40}, None, id="it adds slowly, which is said instead"),
    ],
)
def test_a_server_that_comes_late_to_pushes_is_seen_by_the_workers(planted, slow_way):
    """It records nothing of the time before it takes one, nor does what lies between."""
    assert keys(pushed_by_two(**planted)).slow_way == slow_way


def test_the_server_that_comes_late_to_pushes_is_said():
    """With how long a push of such a size takes that goes to the others."""
    assert (
        "A worker's first push to server 1 takes 41.0 ms (p50), one of such a size or larger to the others 1.00 ms, "
        "and no server is slow to add it: it waits on the way, or until the server gets to it."
    ) in sentences(keys(pushed_by_two(stalled=40)))


def test_keys_may_have_64_bits():
    """Those of a profile that fit no number of servers stand as they are; ps-lite's go up to 2^64 - 1."""
    server = Rank(0, 2, role="server", nonce=9)
    for rank in range(2):
        for declared, partition in ((1, 2), (2**48 - 1, 0), (2**48 - 1, 0xFFFF)):
            request = Descriptor(s.PHASE, s.PUSH, tensor="", key=declared)
            fields = {"seq": 1, "b": rank, "level": Level.PARTITION, "partition": partition}
            server.add(request, 0, rank, rank + 1.0, **fields)

    found = sorted(keys([server.batch()]).servers, key=lambda key: key.key)
    assert [(key.key, key.partition, key.gather.p50) for key in found] == [
        (1 << 16 | 2, 2, MS),
        (2**64 - 2**16, 0, MS),
        (2**64 - 1, 0xFFFF, MS),
    ]


def test_a_push_that_is_missing_or_doubled_tells_nobody_last():
    """Of half an occurrence nobody can say who came last to it."""
    server = pushed()[-1]
    of_first = (server["seq"] == 1) & server.lookup(lambda d: d.name == "push", bool)
    without = server.take(~(of_first & (server["b"] == 1)))
    doubled = replace(server, rows=server.rows.copy())
    doubled.rows["b"][of_first] = 0

    for batch in (without, doubled):
        found = keys([batch])
        assert {key.last for key in found.servers} == {each_late(STEPS - 1)}
        assert [rank.servers.arrivals for rank in found.ranks] == [len(found.servers) * (STEPS - 1)] * 2


def test_the_report_by_key_names_the_rank_the_key_and_the_partition():
    """In words first, then a row for each key."""
    out = io.StringIO()
    write_keys(keys(pushed()), Console(file=out, width=130, color_system=None))
    text = out.getvalue()

    assert "Seen from the workers, rank 1 comes last most often: 20 of 20 times, by 30.0 ms (p50)." in text
    assert "Seen from the servers, rank 1 comes last most often: 40 of 40 times, by 30.0 ms (p50)." in text
    assert "The key that takes longest is 0 conv.weight: 29.0 ms (p50), longest in PULL" in text
    assert "rank 1: 10 of 10, 30.0 ms" in text
    assert "fc.weight [1]" in text


def test_of_local_ranks_the_one_that_pushes_is_not_blamed_alone():
    """A server sees the root of a worker, whichever of its ranks is late."""
    binds = [replace(batch.process.bind, local_world_size=2) for batch in pushed()]
    batches = [replace(b, process=replace(b.process, bind=bind)) for b, bind in zip(pushed(), binds, strict=True)]

    assert sentences(keys(batches))[:2] == [
        "Seen from the workers, rank 1 comes last most often: 20 of 20 times, by 30.0 ms (p50).",
        "Seen from the servers, rank 1, which pushes for its worker's 2 ranks, comes last most often: "
        "40 of 40 times, by 30.0 ms (p50).",
    ]


def test_who_is_seldom_last_but_by_far_is_named_as_well():
    """A rank that is late to one key of three is not hidden behind one that is last, by little, to more of the rest."""
    workers, server = [Rank(rank, 2) for rank in range(2)], Rank(0, 2, role="server", nonce=9)
    for step in range(STEPS):
        # How many ms the ranks are late to each key; rank 0 has the delay, in the first one alone.
        for key, late in enumerate(((30.0 + 10 * (step == 0), 0.0), (0.0, 0.17), (0.0, 0.17))):
            begins = [step * 200.0 + key * 50 + each for each in late]
            operation = Descriptor(s.COLLECTIVE, s.PUSH_PULL, backend="pushpull", tensor=f"t{key}", key=key)
            push = Descriptor(s.PHASE, "push", tensor=f"t{key}", key=key)
            for rank, (worker, begin) in enumerate(zip(workers, begins, strict=True)):
                worker.add(operation, step, begin, max(begins) + 5, seq=step + 1, level=Level.COLLECTIVE, b=-1)
                server.add(push, step, begin + 1, begin + 2, seq=step + 1, b=rank, level=Level.PARTITION)
    found = keys([rank.batch() for rank in (*workers, server)])

    assert sentences(found)[:4] == [
        f"Seen from the {who}, rank {rank} comes last {how}"
        for who in ("workers", "servers")
        for rank, how in (
            (1, "most often: 20 of 30 times, by 0.17 ms (p50)."),
            (0, "by more: 10 of 30 times, by 31.0 ms on average, 40.0 ms at most."),
        )
    ]
    assert found.ranks[0].workers == Last(0, 10, 30, 30 * MS, 310 * MS, 40 * MS)


def test_what_was_not_recorded_is_said_with_its_cure():
    """Of operations alone there are no stages to tell of, and no servers."""
    worker = Rank(0, 2)
    for step in range(2):
        operation = Descriptor(s.COLLECTIVE, s.PUSH_PULL, backend="pushpull", tensor="fc.weight", key=1)
        worker.add(operation, step, step * 10, step * 10 + 5, seq=step + 1, level=Level.COLLECTIVE, b=-1)

    told = "No stage of a partition was recorded, and nothing of a server; they are recorded at level partition: "
    cures = "otel-dltrace run --level partition, or OTEL_DLTRACE_LEVEL=partition."
    assert told + cures in sentences(keys([worker.batch()]))
    assert not any("No stage" in sentence for sentence in sentences(keys(pushed())))


def test_json_holds_all_that_the_report_by_key_says():
    """Programs read the same result, in ns."""
    found = keys(pushed())
    read = json.loads(to_json(found))

    assert set(read) == {"schema", *Keys.__dataclass_fields__}
    assert read["ranks"][1]["servers"] == {
        "rank": 1,
        "times": 40,
        "arrivals": 40,
        "late": 30 * MS,
        "late_total": 1200 * MS,
        "late_max": 30 * MS,
    }


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        pytest.param(0, "were read to +-0.1 us; how well those of several hosts agree is not known.", id="not seen"),
        pytest.param(3_000, "are off by up to 3,014.0 ms: within that none of them comes last.", id="seen"),
    ],
)
def test_clocks_of_workers_that_are_seen_to_be_off_were_not_read_so_badly(ahead, said):
    """What push_pulls show that were done before the last worker had come is no figure of a reading."""
    batches = [
        replace(b, process=replace(b.process, host=f"node-{n}", boot_id=str(n), anchor=Anchor(0, n * ahead * MS, 50)))
        for n, b in enumerate(pushed(late=0.0))
    ]
    out = io.StringIO()
    write_keys(keys(batches), Console(file=out, width=130))

    assert out.getvalue().rstrip().splitlines()[-1] == f"The workers' clocks {said}"


@pytest.mark.parametrize("batches", [[], [Rank().collective(0, 0, 1, 1).batch()]], ids=["no spans", "no push_pull"])
def test_a_run_without_keys_says_so(batches):
    """Nothing is made up for a run that has no parameter server."""
    out = io.StringIO()
    write_keys(keys(batches), Console(file=out, width=130))

    assert out.getvalue() == "This run has no push_pull: --by key reports on the tensors of a parameter server.\n"


def test_the_command_reports_a_real_run_by_key(tmp_path, capsys):
    """Files of real BytePS: every tensor has its row, with the stages that were recorded."""
    run = str(tmp_path / "RUN")
    assert main(["import", "byteps", str(unpack("byteps_w2_s1", tmp_path / "files")), "-o", run]) == 0
    capsys.readouterr()
    assert main(["report", run, "--by", "key", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert main(["report", run, "--by", "key"]) == 0

    stages = {"REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST"}
    assert [{stage["name"] for stage in key["stages"]} for key in read["workers"]] == [stages] * 12
    assert sorted(key["key"] for key in read["workers"]) == [n << 16 for n in range(12)]
    assert "byteps.Gradient.10.bias" in capsys.readouterr().out
