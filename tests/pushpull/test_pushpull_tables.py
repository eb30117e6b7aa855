"""pushpull's tables and values: stages, keys, layout, options, the wire, packing, and the store."""

import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull import lateness
from otel_dltrace.pushpull.buffers import make_buffers
from otel_dltrace.pushpull.compression import Fp16, TopK, pack_sum, unpack
from otel_dltrace.pushpull.contact import error_of
from otel_dltrace.pushpull.errors import MismatchError, PeerLostError, PushPullError
from otel_dltrace.pushpull.keys import HASHES, KeyHash, key_of, partition_bound, partitions, server_of
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options, Tls, read_env
from otel_dltrace.pushpull.peers import Peers
from otel_dltrace.pushpull.queues import StageQueue
from otel_dltrace.pushpull.stages import Q, Signal, Wait, stage_list, waits
from otel_dltrace.pushpull.store import Store
from otel_dltrace.pushpull.tasks import Operation, Task, Tensor
from otel_dltrace.pushpull.transport import client_credentials
from otel_dltrace.pushpull.wire import DTYPES, Request, decode, encode

TWO = Layout(num_workers=2, num_servers=1)
PAIR = Layout(num_workers=2, num_servers=1, local_size=2)
SWITCHES = Layout(local_size=4, pcie_switch_size=2)


def at(layout: Layout, local_rank: int) -> Layout:
    """Return *layout* as another local rank sees it."""
    return Layout(
        layout.worker, layout.num_workers, local_rank, layout.local_size, layout.num_servers, layout.pcie_switch_size
    )


@pytest.mark.parametrize(
    ("layout", "compressed", "stages"),
    [
        pytest.param(Layout(), True, "REDUCE BROADCAST", id="alone"),
        pytest.param(TWO, False, "REDUCE COPYD2H PUSH PULL COPYH2D BROADCAST", id="root"),
        pytest.param(
            TWO, True, "REDUCE COPYD2H COMPRESS PUSH PULL DECOMPRESS COPYH2D BROADCAST", id="root with compressor"
        ),
        pytest.param(at(PAIR, 1), False, "REDUCE COPYD2H PUSH PULL COPYH2D BROADCAST", id="root of two"),
        pytest.param(
            at(PAIR, 0),
            True,
            "COORDINATE_REDUCE REDUCE COPYD2H COORDINATE_PUSH COPYH2D COORDINATE_BROADCAST BROADCAST",
            id="not root",
        ),
        pytest.param(Layout(local_size=2, local_rank=1), False, "REDUCE BROADCAST", id="one machine, root"),
        pytest.param(
            Layout(local_size=2), False, "COORDINATE_REDUCE REDUCE COORDINATE_BROADCAST BROADCAST", id="one machine"
        ),
        pytest.param(
            at(SWITCHES, 3), False, "REDUCE COPYD2H PCIE_REDUCE PUSH COPYH2D BROADCAST", id="two switches, root"
        ),
        pytest.param(
            at(SWITCHES, 1),
            False,
            "REDUCE COPYD2H PCIE_REDUCE COORDINATE_PUSH COPYH2D BROADCAST",
            id="two switches, root of the other",
        ),
        pytest.param(
            at(SWITCHES, 0),
            False,
            "COORDINATE_REDUCE REDUCE COPYD2H PCIE_REDUCE COORDINATE_PUSH COPYH2D COORDINATE_BROADCAST BROADCAST",
            id="two switches, neither",
        ),
    ],
)
def test_the_stages_are_those_of_byteps(layout, compressed, stages):
    """Each rank has the list that BytePS makes for its place."""
    assert " ".join(queue.name for queue in stage_list(layout, compressed)) == stages


def test_switches_that_would_be_uneven_are_one():
    """As in BytePS, local ranks that do not divide into switches share one."""
    assert [Layout(local_size=3, pcie_switch_size=size).num_switches for size in (1, 2, 3, 8)] == [3, 1, 1, 1]


def test_every_stage_that_waits_is_answered():
    """Whoever a stage waits for has a stage itself that sends the signal; nobody waits for himself."""
    for layout in (
        PAIR,
        SWITCHES,
        Layout(local_size=3),
        Layout(num_workers=2, num_servers=1, local_size=6, pcie_switch_size=2),
    ):
        for rank in range(layout.local_size):
            me = at(layout, rank)
            assert waits(me).keys() <= set(stage_list(me, compressed=True))
            assert all(rank not in wait.sources and wait.sources for wait in waits(me).values())


@pytest.mark.parametrize(
    ("local_size", "bound"),
    [(1, 4096000), (2, 4096000), (3, 4104192), (5, 4096000), (6, 4104192), (7, 4100096), (8, 4096000)],
)
def test_the_partition_size_is_rounded_up_to_pages_of_all_local_ranks(local_size, bound):
    """The same bounds as BytePS since 0.2."""
    assert partition_bound(4_096_000, local_size) == bound


def test_partitions_cover_a_tensor():
    """The last partition holds the remainder; a tensor without elements has none."""
    assert partitions(10_000, 4096) == [(0, 4096), (4096, 4096), (8192, 1808)]
    assert partitions(0, 4096) == []


def test_keys_are_those_of_byteps():
    """The declared key is above the partition: the seed's 26148864 is tensor 399."""
    assert (key_of(399, 0), key_of(412, 3)) == (26148864, 27000835)


def test_the_hashes_are_those_of_byteps():
    """djb2, sdbm and std::hash over the decimal digits, naive over the two halves."""
    assert {name: hash_(65536) for name, hash_ in HASHES.items()} == {
        "djb2": ((((5381 * 33 + 54) * 33 + 53) * 33 + 53) * 33 + 51) * 33 + 54,
        "sdbm": ((((54 * 65599 + 53) * 65599 + 53) * 65599 + 51) * 65599 + 54) % 2**64,
        "naive": 9973,
        "built_in": 243660463169716517,
    }
    # As std::hash<std::string> of GNU's C++ library says: no whole word, one, one and a rest, two and a rest.
    assert [HASHES["built_in"](key) for key in (0, 26148864, 4294901760, 123456789012345678)] == [
        2297668033614959926,
        10381957290661307998,
        13942122827148869616,
        9272190511951556031,
    ]
    assert [server_of(key_of(tensor, 0), 3, KeyHash("djb2")) for tensor in range(8)] == [
        HASHES["djb2"](tensor << 16) % 3 for tensor in range(8)
    ]


@pytest.mark.parametrize(
    ("servers", "workers", "kept"),
    [
        pytest.param(3, 2, [1, 0, 0, 0, 0, 0, 0, 2, 0, 1, 2, 0], id="one on its own"),
        pytest.param(6, 4, [4, 0, 1, 0, 0, 1, 0, 1, 0, 4, 1, 1], id="two on their own"),
        pytest.param(2, 2, [0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1], id="each beside a worker"),
    ],
)
def test_mixed_gives_more_to_servers_on_their_own(servers, workers, kept):
    """As BytePS's function, compiled, has it for the first twelve tensors."""
    assert [server_of(tensor << 16, servers, KeyHash("mixed"), workers) for tensor in range(12)] == kept


ENV = {
    "DMLC_WORKER_ID": "1",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "3",
    "BYTEPS_LOCAL_RANK": "2",
    "BYTEPS_LOCAL_SIZE": "4",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "1234",
    "BYTEPS_SCHEDULING_CREDIT": "4",
    "PUSHPULL_TOKEN": "secret",
    "PUSHPULL_DIR": "/x",
}


def test_layout_and_options_come_from_the_environment():
    """BytePS's variables mean what they do there."""
    layout, options = read_env(ENV)
    assert layout == Layout(1, 2, 2, 4, 3)
    assert (layout.rank, layout.size, layout.root, layout.signal_root) == (6, 8, 3, 3)
    assert options == Options(credit=4, root="10.0.0.1:1234", token="secret", folder=options.folder)


@pytest.mark.parametrize(
    ("env", "key_hash"),
    [
        pytest.param({"BYTEPS_ENABLE_MIXED_MODE": "1"}, KeyHash("mixed"), id="mixed mode"),
        pytest.param(
            {"BYTEPS_KEY_HASH_FN": "mixed", "BYTEPS_MIXED_MODE_BOUND": "7", "BYTEPS_BUILT_IN_HASH_COEF": "3"},
            KeyHash("mixed", bound=7),
            id="bound",
        ),
        pytest.param(
            {"BYTEPS_KEY_HASH_FN": "built_in", "BYTEPS_BUILT_IN_HASH_COEF": "3", "BYTEPS_MIXED_MODE_BOUND": "x"},
            KeyHash("built_in", coefficient=3),
            id="coefficient",
        ),
    ],
)
def test_a_hash_is_told_what_it_is_told_in_byteps(env, key_hash):
    """Mixed mode is stronger than the name of another function; what another function is told is not read."""
    assert read_env({**ENV, **env})[1].key_hash == key_hash


def test_coefficient_and_bound_are_those_of_byteps():
    """As BytePS's functions, compiled, have it: the product is of 64 bits; a smaller bound gives other servers."""
    mixed = [server_of(tensor << 16, 3, KeyHash("mixed", bound=7), 2) for tensor in range(9)]
    assert (mixed, server_of(65536, 7, KeyHash("built_in", coefficient=1_000_003))) == ([0, 0, 0, 0, 0, 1, 2, 2, 2], 6)


@pytest.mark.parametrize(("content", "says"), [(None, "cannot be read: No such file"), (b"\n", "is empty")])
def test_a_key_that_is_not_there_is_one_sentence(content, says, tmp_path):
    """It names the variable. Of an empty one gRPC would end the process."""
    key = tmp_path / "key.pem"
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"PUSHPULL_TLS_KEY={key} {says}")):
        client_credentials(Tls(None, key, None))


@pytest.mark.parametrize("host", ["fd00::5", "[fd00::5]"])
def test_an_address_of_ipv6_is_told_from_its_port(host):
    """As Kubernetes gives a pod's address, and as it stands in a URL."""
    _, options = read_env({**ENV, "DMLC_PS_ROOT_URI": host, "DMLC_NODE_HOST": host})
    assert (options.root, options.host) == ("[fd00::5]:1234", "[fd00::5]")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"DMLC_NUM_WORKER": "two"}, "DMLC_NUM_WORKER='two' is not a whole number from 1", id="no number"),
        pytest.param(
            {"BYTEPS_PARTITION_BYTES": "4294967296"},
            "BYTEPS_PARTITION_BYTES='4294967296' is not a whole number from 1 to 1000000000",
            id="more than a message holds",
        ),
        pytest.param({"DMLC_WORKER_ID": "9" * 5000}, "is not a whole number from 0 to 2147483647", id="digits"),
        pytest.param(
            {"BYTEPS_LOCAL_SIZE": "2"}, "BYTEPS_LOCAL_RANK=2 is too high: with 2 in all, the highest is 1", id="rank"
        ),
        pytest.param(
            {"DMLC_NUM_SERVER": ""}, "DMLC_NUM_SERVER is not set: several workers need one server", id="no server"
        ),
        pytest.param({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER=0: several workers need one server", id="0 servers"),
        pytest.param(
            {"DMLC_NUM_SERVER": "0", "DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0", "BYTEPS_FORCE_DISTRIBUTED": "1"},
            "DMLC_NUM_SERVER=0: BYTEPS_FORCE_DISTRIBUTED=1 needs one server or more (--servers of launch)",
            id="forced",
        ),
        pytest.param({"DMLC_SERVER_ID": "3"}, "'3' is not a whole number from 0 to 2", id="server"),
        pytest.param({"DMLC_PS_ROOT_PORT": "0"}, "'0' is not a whole number from 1 to 65535", id="port"),
        pytest.param({"PUSHPULL_TOKEN": ""}, "PUSHPULL_TOKEN is not set", id="no token"),
        pytest.param({"PUSHPULL_TOKEN": "secret\n"}, "PUSHPULL_TOKEN has characters that cannot be sent", id="token"),
        pytest.param({"BYTEPS_KEY_HASH_FN": "md5"}, "BYTEPS_KEY_HASH_FN='md5' is not one of djb2", id="hash"),
        pytest.param(
            {"BYTEPS_KEY_HASH_FN": "mixed", "DMLC_NUM_SERVER": "5"},
            "DMLC_NUM_SERVER=5 and DMLC_NUM_WORKER=2",
            id="mixed",
        ),
        pytest.param(
            {"BYTEPS_ENABLE_MIXED_MODE": "1", "BYTEPS_MIXED_MODE_BOUND": "2"},
            "BYTEPS_MIXED_MODE_BOUND=2 is less than DMLC_NUM_SERVER=3",
            id="bound",
        ),
        pytest.param({"PUSHPULL_TIMEOUT": "-1"}, "PUSHPULL_TIMEOUT='-1' is not a number of seconds", id="timeout"),
        pytest.param({"PUSHPULL_TLS_CERT": "c"}, "PUSHPULL_TLS_CERT and PUSHPULL_TLS_KEY go together", id="tls"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(change, says):
    """One sentence: which variable, its value, and what it should be."""
    with pytest.raises(ConfigError, match=re.escape(says)):
        read_env({**ENV, **change})


def request(worker: int = 0, round_: int = 0, **change: object) -> Request:
    """Return a request for a small tensor."""
    fields = {"key": 65536, "rank": worker, "name": "w", "dtype": "float32", "nbytes": 16, **change}
    return Request(round=round_, worker=worker, **fields)  # type: ignore[arg-type]


@given(
    key=st.integers(0, 2**48 - 1),
    round_=st.integers(0, 2**63),
    worker=st.integers(0, 65535),
    name=st.text(max_size=40),
    dtype=st.sampled_from(DTYPES),
    asynchronous=st.booleans(),
    payload=st.binary(max_size=50),
)
def test_a_message_is_read_as_it_was_written(key, round_, worker, name, dtype, asynchronous, payload):
    """Reading a written request gives the request and its payload."""
    sent = request(worker, round_, key=key, name=name, dtype=dtype, asynchronous=asynchronous)
    received, values = decode(encode(sent, payload))
    assert (received, bytes(values)) == (sent, payload)


@given(message=st.binary(max_size=120))
def test_no_bytes_crash_a_server(message):
    """What is no request is refused in a sentence, whatever it is."""
    with suppress(PushPullError):
        unpack(*decode(message))


VALUES = np.array([0.5, -3.0, 0.25, 2.0], np.float32)


def test_half_precision_goes_and_comes_back():
    """What half precision can hold is not changed."""
    packed = Fp16().packer().pack(VALUES)
    assert (len(packed), unpack(request(packing=1), packed).tolist()) == (8, VALUES.tolist())


def test_top_k_sends_later_what_it_left_out():
    """The largest elements go at once; the others are added to the next round's."""
    packer = TopK(0.5).packer()
    rounds = [unpack(request(packing=2), packer.pack(VALUES)) for _ in range(4)]
    assert rounds[0].tolist() == [0, -3.0, 0, 2.0]
    assert np.sum(rounds, axis=0).tolist() != (4 * VALUES).tolist()
    rest = unpack(request(packing=2), TopK(1.0).packer().pack(packer._left_out))
    assert (np.sum(rounds, axis=0) + rest).tolist() == (4 * VALUES).tolist()


@pytest.mark.parametrize("ratio", [0, -0.5, 1.01])
def test_top_k_of_nothing_or_of_more_than_all_is_refused(ratio):
    """When it is made, and not at the first push."""
    with pytest.raises(MismatchError, match=rf"TopK\({ratio}\): the ratio must be above 0 and at most 1"):
        TopK(ratio)


def test_top_k_keeps_nothing_infinite():
    """One round that overflowed does not spoil the next, whether its infinite elements were sent or not."""
    packer = TopK(0.25).packer()
    packer.pack(np.array([np.inf, -np.inf, np.nan, 1.0], np.float32))
    rest = [unpack(request(packing=2), packer.pack(np.zeros(4, np.float32))).tolist() for _ in range(2)]
    assert rest == [[0, 0, 0, 1.0], [0, 0, 0, 0]]


def test_a_sparse_sum_loses_nothing():
    """The server answers with every element that any worker sent."""
    total = np.array([0, 1.5, 0, -2], np.float32)
    assert unpack(request(packing=2), pack_sum(2, total)).tolist() == total.tolist()


@pytest.mark.parametrize(
    "payload", [b"", b"\x01\0\0\0\xff\0\0\0\0\0\0\0", b"\xff\xff\xff\xff"], ids=["none", "outside", "short"]
)
def test_a_sparse_payload_that_lies_is_refused(payload):
    """Neither too few bytes nor an index outside the partition gets into a sum."""
    with pytest.raises(MismatchError):
        unpack(request(packing=2), payload)


def filled(value: float) -> np.ndarray:
    """Return the values of the small tensor."""
    return np.full(4, value, np.float32)


def joined(num_workers: int = 2) -> Store:
    """Return a store whose workers are all there."""
    store = Store(num_workers)
    for worker in range(num_workers):
        store.join(worker, num_workers, {})
    return store


def test_a_pull_waits_for_all_pushes():
    """The sum is there when the last worker has pushed, and for each worker."""
    store = joined()
    assert not store.push(request(0), filled(1))
    assert store.pull(request(0)) is None
    assert store.push(request(1), filled(2))
    assert [store.pull(request(worker))[1].tolist() for worker in (0, 1)] == [[3.0] * 4] * 2


def test_a_fast_worker_may_be_a_round_ahead():
    """The next round does not mix with one that a slow worker has yet to pull."""
    store = joined()
    for worker in (0, 1):
        store.push(request(worker), filled(1))
    store.pull(request(0))
    store.push(request(0, 1), filled(10))
    assert store.pull(request(1))[1].tolist() == [2.0] * 4
    store.push(request(1, 1), filled(10))
    assert store.pull(request(0, 1))[1].tolist() == [20.0] * 4


def test_an_asynchronous_key_is_pulled_at_once():
    """Pushes add to the value that the first worker gave it."""
    store = joined()
    store.initialize(request(0, asynchronous=True), filled(5))
    store.initialize(request(1, asynchronous=True), filled(7))
    store.push(request(1, asynchronous=True), filled(1))
    assert store.pull(request(1, asynchronous=True))[1].tolist() == [6.0] * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"name": "v"}, "('v', 16 bytes of float32) of worker 1 is key 65536 ('w',", id="name"),
        pytest.param({"key": 2 << 16}, "'w' has the key 131072 on worker 1, and 65536 on worker 0", id="key"),
        pytest.param({"dtype": "int32"}, "16 bytes of int32) of worker 1 is key 65536", id="dtype"),
        pytest.param({"packing": 1}, "worker 1 compresses it differently", id="packing"),
        pytest.param({"worker": 0}, "worker 0 pushes round 0 again", id="again"),
    ],
)
def test_workers_that_disagree_are_told_so(change, says):
    """A push that does not fit names both sides."""
    store = joined()
    store.push(request(0), filled(1))
    fields = {"worker": 1, **change}
    with pytest.raises(MismatchError, match=re.escape(says)):
        store.push(request(**fields), filled(1))


def test_a_worker_that_left_is_not_waited_for():
    """Who has pushed may leave; who has not takes the round with it."""
    store = joined(3)
    for worker in (0, 1, 2):
        store.push(request(worker), filled(1))
    store.leave(2)
    assert store.pull(request(0)) is not None
    store.push(request(0, 1), filled(1))
    with pytest.raises(PeerLostError, match="worker 2 has left and never pushed round 1 of 'w'"):
        store.pull(request(0, 1))


def test_a_death_is_told_to_everybody():
    """After a worker died no push is taken, and no pull waits."""
    store = joined()
    store.leave(1, "it died")
    store.leave(1)
    for call in (lambda: store.push(request(0), filled(1)), lambda: store.pull(request(0))):
        with pytest.raises(PeerLostError, match="worker 1: it died"):
            call()


def test_a_server_stays_until_all_have_come_and_left():
    """Also when one died before another came: that one is to be told."""
    store = Store(2)
    seen = [store.deserted]
    for step in (lambda: store.join(0, 2, {}), lambda: store.leave(0, "it died"), lambda: store.join(1, 2, {})):
        step()
        seen.append(store.deserted)
    store.leave(1)
    assert (seen, store.deserted) == ([False] * 4, True)


def test_a_stranger_worker_is_refused():
    """A worker of another world, or one that is here already, does not join."""
    store = joined()
    for worker, num_workers, says in (
        (0, 2, "is here already"),
        (0, 3, "worker 0 of 3"),
        (2, 2, "worker 2 of 2"),
        (-1, 2, "worker -1 of 2"),
    ):
        with pytest.raises(MismatchError, match=says):
            store.join(worker, num_workers, {})
    with pytest.raises(MismatchError, match=r"bytes of float32\) is of worker 2; there are 2"):
        store.push(request(2), filled(1))


def test_with_credit_the_highest_priority_goes_first_within_the_credit():
    """Sorted by priority, then key; what is out counts until it is finished."""

    def task(key: int, priority: int) -> Task:
        tensor = Tensor("t", 0, priority, stages=(Q.REDUCE,))
        return Task(Operation(tensor, VALUES, 1, False, 0), 0, key, 0, 10, None)

    queue = StageQueue(Q.REDUCE, credit=20)
    for one in (task(1, 0), task(3, 5), task(2, 5), task(4, 9)):
        queue.put(one)
    out = [queue.take(), queue.take()]
    assert [one.key for one in out] == [4, 2]
    assert queue.credit == 0
    queue.finished(out[0])
    assert queue.take().key == 3


class Counted:
    """A partition that counts how often its key is read."""

    name, mark, priority, nbytes, reads = "t", 7, 0, 1, 0

    def __init__(self, key: int) -> None:
        self._key = key

    @property
    def key(self) -> int:
        """The partition's key."""
        Counted.reads += 1
        return self._key


def test_first_come_is_first_served_among_those_that_are_ready():
    """However the signals come: before the partitions, behind them, in another order."""
    queue = StageQueue(Q.REDUCE, Wait(Signal.REDUCE_READY, frozenset({1, 2})))
    for source, key in ((1, 5), (2, 5), (1, 3), (1, 4), (2, 4)):
        queue.signalled(source, key, 7)
    for key in (3, 4, 5, 6):
        queue.put(Counted(key))
    out = [queue.take()._key, queue.take()._key]
    queue.signalled(2, 3, 7)
    assert (out, queue.take()._key, queue.waiting_for(6)) == ([4, 5], 3, [1, 2])


@pytest.mark.parametrize("credit", [None, 1])
def test_a_signal_is_looked_at_once_however_many_wait(credit):
    """A tensor may have thousands of partitions, all of which wait for another rank."""
    queue = StageQueue(Q.REDUCE, Wait(Signal.REDUCE_READY, frozenset({1})), credit)
    Counted.reads, number = 0, 300
    for key in range(number):
        queue.put(Counted(key))
    for key in reversed(range(number)):
        queue.signalled(1, key, 7)
        queue.finished(queue.take())
    assert Counted.reads <= 10 * number


def test_time_in_which_nobody_polls_makes_nobody_late(monkeypatch):
    """A late poll fails nothing that `synchronize` would wait for; who asks again and again has waited."""
    clock = iter([5.0, 1000.0, 1000.5, 2000.0, 2001.0])
    monkeypatch.setattr(lateness, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    operation = Operation(Tensor("w", 0), np.zeros(1), 1, False, 0)
    assert [lateness.is_late(operation, Layout(), 3.0) for _ in range(5)] == [False, False, False, False, True]


@pytest.mark.parametrize(("nbytes", "files"), [pytest.param(0, 0, id="nothing"), pytest.param(4, 1, id="a number")])
def test_a_tensor_without_elements_has_no_shared_file(nbytes, files, tmp_path):
    """It is done at once: a rank would remove the file before another one makes it anew, and that one would stay."""
    make_buffers(Layout(local_size=2), tmp_path, 0, 0, nbytes)
    assert len([*tmp_path.iterdir()]) == files


def test_a_root_that_stands_still_is_waited_for_no_longer_than_it_may_take():
    """It waits three times as long as anybody does: for server 0, for the others, for all workers."""
    peers = Peers(Layout(num_workers=2, num_servers=1, local_size=2), Options(timeout_s=0.01), SimpleNamespace())
    with pytest.raises(PeerLostError, match=r"^local rank 1 did not meet the servers in 0\.03 s$"):
        peers.wait_for_root()


def test_a_folder_with_too_long_a_path_is_one_sentence(tmp_path):
    """The kernel has 108 bytes for the path of a socket, and says no more than that it is too long."""
    folder = tmp_path / ("x" * 200)
    with pytest.raises(ConfigError, match=r"1\.sock has \d+ bytes, and a socket's path 107 at most; set PUSHPULL_DIR"):
        Peers(Layout(local_size=2), Options(folder=folder), SimpleNamespace()).open()


@pytest.mark.parametrize(("below", "why"), [("", "File exists"), ("/x", "Not a directory")], ids=["file", "below"])
def test_a_folder_that_cannot_be_made_is_one_sentence(below, why, tmp_path):
    """And not an error of `pathlib` that does not say which variable names it."""
    folder = Path(f"{tmp_path}/file{below}")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^{folder} cannot be made: {why}; set PUSHPULL_DIR to one that can be$"):
        Peers(Layout(local_size=2), Options(folder=folder), SimpleNamespace()).open()


@pytest.mark.parametrize("local_rank", [0, 9, 10], ids=["first", "last of one digit", "longest"])
def test_a_path_too_long_for_one_local_rank_is_so_for_all(local_rank, tmp_path, monkeypatch):
    """Else the others would wait for it until the timeout, or call it and have the kernel's bare word."""
    monkeypatch.chdir(tmp_path)
    folder = Path("x" * (107 - len("/9.sock")))
    with pytest.raises(ConfigError, match=r"/10\.sock has 108 bytes"):
        Peers(Layout(local_rank=local_rank, local_size=11), Options(folder=folder), SimpleNamespace()).open()


class Exhausted(grpc.RpcError, grpc.Call):
    """What gRPC raises of a limit."""

    __abstractmethods__ = frozenset()  # of a call's many methods two are asked

    def __init__(self, details: str) -> None:
        self.code, self.details = (lambda: grpc.StatusCode.RESOURCE_EXHAUSTED), (lambda: details)


@pytest.mark.parametrize(
    ("details", "asks"),
    [
        pytest.param("Received message larger than max (9 vs. 4)", True, id="message"),
        pytest.param("received metadata size exceeds hard limit", False, id="metadata"),
    ],
)
def test_the_partition_size_is_asked_for_where_a_message_is_too_large(details, asks):
    """Of gRPC's limits that alone follows from it."""
    assert ("is BYTEPS_PARTITION_BYTES the same everywhere?" in str(error_of(Exhausted(details), "it"))) is asks
