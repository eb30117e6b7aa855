"""The pure core: ids against SHA-256 by hand, windows, budget, clocks and the column layout."""

import hashlib
import pickle
from collections import Counter
from itertools import count

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_dltrace.export.rings.records import RECORD_DTYPE
from otel_dltrace.model import identity, numbers
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import grouped, places_in
from otel_dltrace.model.attributes import collective_ids, constant_attributes
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.identity import (
    NO_STEP,
    Bind,
    digest,
    h64,
    h64_each,
    h128_each,
    mix64,
    p2p_id,
    rank_step_id,
    root_id,
    run_directory_name,
    span_id,
    trace_id,
)
from otel_dltrace.model.operation import OTHER, RANK_STEP, Descriptor
from otel_dltrace.model.plan import STEP_SHARE, SlowSteps, Window, for_servers, parse_level, share_of
from otel_dltrace.model.semconv import Flag, Level, Source
from otel_dltrace.model.spans import SPAN_DTYPE, Process, SpanBatch, concatenate, empty_rows, fill_ids
from otel_dltrace.model.time import Anchor, HostClock, tightest_anchor
from tests.support.processes import attributes_of

BIND = Bind("job", "3.00ff", "my job/1", world="w", role="worker", rank=5, world_size=8)
PINNED = (
    "96b3b7c4fa65b393c72065baf9b4fe42",
    "1ade7d72d9584ac4",
    "c259874b2c0ce052",
    "76bcaacf7dd1ba3a",
    "a8391e4528c2a97f",
)
words = st.integers(0, 2**64 - 1)


# -- ids -----------------------------------------------------------------------------------------


def by_hand(*fields: bytes) -> bytes:
    """Return SHA-256 as contract 1 writes it: the tag of the project, then each field with its length."""
    data = b"otel_dltrace.1" + b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hashlib.sha256(data).digest()


def test_hashes_are_those_of_the_contract():
    """Integers in decimal, text in UTF-8, 8 bytes big-endian, 16 with the top bit set."""
    raw = by_hand(b"tag", "schrödinger".encode(), b"42", b"")
    assert digest("tag", "schrödinger", 42, "") == raw
    assert h64("tag", "schrödinger", 42, "") == int.from_bytes(raw[:8], "big")
    assert h128_each("tag", "schrödinger", 42, last=[""])[0] == int.from_bytes(raw[:16], "big") | 1 << 127
    assert h64_each("tag", "schrödinger", last=[0, 7, 2**32 - 1]) == [
        h64("tag", "schrödinger", n) for n in (0, 7, 2**32 - 1)
    ]


def test_every_id_hashes_its_fields():
    """All of contract 1's table, by hand."""
    run = (b"job", b"3.00ff", b"w")
    assert trace_id(BIND, 17, 2) == int.from_bytes(by_hand(b"trace", *run, b"2", b"17")[:16], "big") | 1 << 127
    assert root_id(BIND, 17) == int.from_bytes(by_hand(b"root", *run, b"0", b"17")[:8], "big")
    assert rank_step_id(BIND, 17) == int.from_bytes(by_hand(b"rank", *run, b"worker", b"5", b"17")[:8], "big")
    wanted = by_hand(b"coll", *run, b"collective", b"0", b"", b"9")
    assert identity.collective_ids(BIND, "collective", "0", "", [9]) == [int.from_bytes(wanted[:8], "big")]
    wanted = by_hand(b"p2p", *run, b"0", b"1", b"2", b"77", b"4")
    assert p2p_id(BIND, "0", 1, 2, 77, 4) == int.from_bytes(wanted[:8], "big")


def test_ids_never_change():
    """Released ids are for ever: a replay with a later version must double nothing."""
    assert (f"{trace_id(BIND, 17):032x}", f"{root_id(BIND, 17):016x}", f"{rank_step_id(BIND, 17):016x}") == PINNED[:3]
    (collective,) = identity.collective_ids(BIND, "collective", "0", "", [9])
    assert (f"{collective:016x}", f"{span_id(1, 2, 3):016x}") == PINNED[3:]


def test_fields_cannot_run_into_each_other():
    """The length before each field keeps ("ab", "c") from ("a", "bc")."""
    assert len({h64("x", "ab", "c"), h64("x", "a", "bc"), h64("x", "abc"), h64("xa", "bc")}) == 4


def test_splitmix64_is_the_published_one():
    """The reference generator seeded with 1234567, whose state advances by the golden gamma, and with 0."""
    golden = 0x9E37_79B9_7F4A_7C15
    states = [(1234567 + i * golden) % 2**64 for i in range(5)]
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [mix64(state) for state in states] == known
    assert mix64(np.array(states, np.uint64)).tolist() == known
    assert mix64(0) == 0xE220_A839_7B1D_CDAF


@given(st.lists(st.tuples(words, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=9))
def test_ints_and_arrays_give_the_same_span_ids(triples):
    """The trainer computes with ints, the drain with arrays of uint64."""
    columns = [np.array(column, np.uint64) for column in zip(*triples, strict=True)]
    assert span_id(*columns).tolist() == [span_id(*triple) for triple in triples]


@given(st.sets(words, min_size=2, max_size=50))
def test_mixing_is_a_bijection(values):
    """Different numbers stay different, so no two spans of a process share an id."""
    assert len({mix64(value) for value in values}) == len(values)


def test_no_span_id_is_zero():
    """0 is no id in OpenTelemetry; the one number that mixes to it becomes 1."""
    zero = 0x61C8_8646_80B5_83EB  # minus the golden gamma: the state before 0
    assert mix64(zero) == 0
    assert span_id(zero, 0, 0) == 1
    assert span_id(np.array([zero], np.uint64), np.array([0], np.uint64), np.array([0], np.uint64)).tolist() == [1]


def test_a_bind_survives_its_file():
    """What a newer version adds is ignored."""
    assert Bind.read({**BIND.fields(), "colour": "red"}) == BIND
    assert (BIND.from_now(7).from_step, BIND.generation_number) == (7, 3)
    assert Bind("job", "random").generation_number == 0


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("my job/1", "dltrace-my_job_1-"),
        ("", "dltrace-job-"),
        ("../../etc", "dltrace-.._.._etc-"),
        ("x" * 99, "dltrace-" + "x" * 64 + "-"),
    ],
)
def test_a_run_directory_has_one_name_per_generation(name, start):
    """The name is safe as a file name, and ends in 8 digits of the generation's hash."""
    found = run_directory_name(Bind("job", "3.00ff", name))
    assert found == start + f"{h64('job', '3.00ff'):016x}"[:8]


# -- what is recorded and sent -------------------------------------------------------------------


def test_levels_have_names():
    """And a wrong one is answered with the right ones."""
    assert [parse_level(text) for text in ("step", " Phase ", "PARTITION")] == [1, 3, 4]
    with pytest.raises(ConfigError, match="'all' is not a level; use one of step, collective, phase, partition"):
        parse_level("all")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        pytest.param("first=3,every=5", [0, 1, 2, 5, 10], id="default's shape"),
        pytest.param("3-5", [3, 4, 5], id="both ends included"),
        pytest.param("7-7, 9-10", [7, 9, 10], id="several"),
        pytest.param("all", list(range(12)), id="all"),
        pytest.param("every=1", list(range(12)), id="every step"),
        pytest.param("3-4,all", list(range(12)), id="all and more"),
    ],
)
def test_a_window_is_a_union(text, steps):
    """Of ranges, first steps and periods."""
    window = Window.parse(text)
    assert [step for step in range(12) if step in window] == steps


@pytest.mark.parametrize(
    "text", ["", "5", "5-3", "first=0", "every=0", "every=-1", "first=x", "1-2-3", "all,", "first = 5"]
)
def test_a_malformed_window_is_refused(text):
    """The sentence names the field and its value."""
    with pytest.raises(ConfigError, match=r"^steps="):
        Window.parse(text)


def test_slow_steps_are_told_by_the_last_fifty():
    """Over 1.5 times the median, once there are three to compare with."""
    slow = SlowSteps()
    assert [slow.is_slow(n) for n in (100, 10, 10, 15, 16, 30)] == [False, False, False, False, False, True]

    took, slow = [10, 10, 90, *[10] * 57, *[20] * 25, 24, *[20] * 25, *[n * n % 97 for n in range(60)]], SlowSteps()
    before = [took[max(n - 50, 0) : n] for n in range(len(took))]
    assert [slow.is_slow(n) for n in took] == [
        len(last) >= 3 and n > 1.5 * float(np.median(last)) for n, last in zip(took, before, strict=True)
    ]


worlds = st.tuples(st.integers(1, 300), st.integers(0, 8), st.integers(80, 40_000), st.integers(0, 5000))


@given(worlds)
@example((1, 0, 10_000, 0))
@example((5000, 0, 10_000, 3))
@example((625, 0, 10_000, 3))
@example((626, 0, 10_000, 3))
def test_the_budget_of_a_trace_is_kept(world):
    """In every shard what the ranks in full may send, servers for them, and all ranks' stages stay within it."""
    world_size, servers, budget, step = world
    shares = [share_of(rank, world_size, servers, budget, step) for rank in range(world_size + servers)]
    for shard in {share.shard for share in shares}:
        members = [share for share in shares if share.shard == shard]
        in_full = [share.limit for share in members if share.full]
        assert len(in_full) >= 1
        of_servers = servers * sum(for_servers(share, servers) for share in members if share.full)
        assert sum(in_full) + of_servers + len(members) * STEP_SHARE <= budget


@given(worlds)
def test_the_number_of_shards_is_that_of_the_contract(world):
    """There are ceil(W * S / (0.8 * budget)) of them; ranks next to each other share one."""
    world_size, servers, budget, step = world
    members = world_size + servers
    shards = next(n for n in count(1) if 8 * budget * n >= members * STEP_SHARE * 10)
    found = [share_of(rank, world_size, servers, budget, step).shard for rank in range(members)]
    assert found == [rank * shards // members for rank in range(members)]


@pytest.mark.parametrize("world_size", [1, 2, 8, 13, 64])
def test_every_rank_gets_its_turn(world_size):
    """Which ranks go out in full moves with the step, without favour."""
    turns = Counter(
        rank
        for step in range(100 * world_size)
        for rank in range(world_size)
        if share_of(rank, world_size, 0, 10_000, step).full
    )
    mean = sum(turns.values()) / world_size
    assert len(turns) == world_size
    assert all(0.6 * mean <= turn <= 1.4 * mean for turn in turns.values())


def test_two_ranks_go_out_in_full_by_default():
    """A trace of 10,000 spans holds two ranks at full detail, 4,984 spans each."""
    assert [(x.full, x.shard, x.limit) for x in (share_of(r, 2, 0, 10_000, 5) for r in range(2))] == [
        (True, 0, 4984)
    ] * 2


def test_no_budget_is_no_limit():
    """A budget of 0 sends everything."""
    share = share_of(7, 9000, 0, 0, 3)
    assert (share.full, share.shard, share.limit > 2**60) == (True, 0, True)


# -- time ----------------------------------------------------------------------------------------


def test_the_tightest_of_five_readings_counts():
    """The anchor is in the middle of its two monotonic reads, half of their distance uncertain."""
    monotonic = iter([0, 100, 200, 210, 400, 460, 500, 580, 600, 690])
    wall = iter([1000, 2000, 3000, 4000, 5000])
    anchor = tightest_anchor(lambda: next(monotonic), lambda: next(wall))
    assert (anchor, anchor.offset) == (Anchor(205, 2000, 5), 1795)


def test_the_offset_stays_until_the_wall_clock_is_set():
    """Up to 1 ms of slewing changes nothing, so that spans keep their order."""
    clock = HostClock(Anchor(0, 5000, 10))
    assert not clock.renew(Anchor(0, 5000 + 1_000_020, 10))
    assert clock.anchor.offset == 5000
    assert clock.renew(Anchor(0, 5000 - 1_000_021, 10))
    assert clock.anchor.offset == 5000 - 1_000_021


def test_an_earlier_offset_holds_unless_the_wall_clock_was_set():
    """What went out with it and goes out again has the same times."""
    clock = HostClock(Anchor(0, 5000, 10))
    clock.go_on(Anchor(0, 5007, 20))
    assert clock.anchor == Anchor(0, 5007, 20)
    clock.go_on(Anchor(0, 5007 + 1_000_041, 20))
    assert clock.anchor == Anchor(0, 5007, 20)


# -- descriptors and columns ---------------------------------------------------------------------


def test_unnamed_tensors_and_endless_names_do_not_fill_the_table():
    """Horovod's running numbers are folded, texts bounded, and what is no UTF-8 replaced; BytePS's name parameters."""
    numbered = [Descriptor("phase", "x", backend=one, tensor="a.noname.17") for one in ("horovod", "byteps")]
    assert [one.normal().tensor for one in numbered] == ["a.noname.N", "a.noname.17"]
    assert len(Descriptor("phase", "x" * 5000).normal().name) == 4096
    assert Descriptor("phase", "a\udcffb").normal().name == "a?b"
    assert Descriptor("phase", "PUSH", key=3).fields() == {"kind": "phase", "name": "PUSH", "key": 3}


def batch(*rows: tuple[Descriptor, dict], bind: Bind | None = BIND, errors=(("", ""),)) -> SpanBatch:
    """Return these rows, ids computed."""
    table = list(dict.fromkeys(descriptor for descriptor, _ in rows))
    columns = empty_rows(len(rows))
    for i, (descriptor, fields) in enumerate(rows):
        columns["descriptor"][i] = table.index(descriptor)
        for name, value in fields.items():
            columns[name][i] = value
    process = Process(77, bind)
    fill_ids(columns, table, process)
    return SpanBatch(columns, table, process, errors)


FORWARD = Descriptor(s.STAGE, "forward")
REDUCE = Descriptor(s.COLLECTIVE, "all_reduce", group="0", backend="gloo", group_size=8, dtype="float32")
PUSH = Descriptor(s.PHASE, "PUSH", key=3, queue_type="PUSH")


def test_ids_and_parents_follow_from_ordinals():
    """A step's id is the one all ranks know; children of nobody hang under their step, or under nothing."""
    made = batch(
        (RANK_STEP, {"step": 4, "span_no": 1}),
        (REDUCE, {"step": 4, "span_no": 2}),
        (PUSH, {"step": 4, "span_no": 3, "parent_no": 2}),
        (PUSH, {"step": NO_STEP, "span_no": 4}),
    )
    step, reduce = rank_step_id(BIND, 4), span_id(77, 4, 2)
    assert made["span_id"].tolist() == [step, reduce, span_id(77, 4, 3), span_id(77, NO_STEP, 4)]
    assert made["parent_id"].tolist() == [0, step, reduce, 0]


def test_an_unbound_process_has_spans_without_steps():
    """Before BIND nobody knows the step's id; the spans' own ids are certain already."""
    made = batch((REDUCE, {"step": 4, "span_no": 2}), bind=None)
    assert (made["span_id"].tolist(), made["parent_id"].tolist(), made.rank) == ([span_id(77, 4, 2)], [0], -1)
    assert collective_ids(made).tolist() == [0]


def test_a_span_is_a_row_of_eighty_bytes_that_begins_as_its_record():
    """The layout that drain, run directory and exporters share: 64 bytes of the ring, copied, are most of a row."""
    shared = {"level": "kind", "source": "level_source", "error": "commit"}
    places = {name: at for name, (_, at, *_) in SPAN_DTYPE.fields.items() if at < RECORD_DTYPE.itemsize}
    assert (SPAN_DTYPE.itemsize, RECORD_DTYPE.itemsize) == (80, 64)
    assert places == {name: RECORD_DTYPE.fields[shared.get(name, name)][1] for name in places}
    assert pickle.loads(pickle.dumps(batch((PUSH, {})))).descriptors == [PUSH]


def test_a_descriptor_that_is_not_known_is_other():
    """A row may speak of a name that was not read yet."""
    made = batch((PUSH, {}), (PUSH, {"descriptor": 9}))
    assert made.is_kind(s.PHASE).tolist() == [True, True]
    assert made.lookup(lambda d: d.name, object).tolist() == ["PUSH", "other"]
    assert made.descriptor_of(1) is OTHER
    assert made.take(made["descriptor"] == 9).rows["descriptor"].tolist() == [9]


def test_parts_of_a_process_join():
    """The longest table wins, since tables only grow; errors are numbered on."""
    one = batch((PUSH, {"error": 1}), errors=(("", ""), ("ValueError", "x")))
    two = batch((PUSH, {"error": 0}), (REDUCE, {"error": 2}), errors=(("", ""), ("A", ""), ("B", "")))
    whole = concatenate([one, two])
    assert concatenate([]) is None
    assert whole is not None
    assert whole.descriptors == [PUSH, REDUCE]
    assert [whole.errors[e][0] for e in whole["error"].tolist()] == ["ValueError", "", "B"]


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_a_value_is_found_where_it_comes_first(values, known):
    """In no order, several times, among none."""
    found = places_in(np.array(values, np.uint64), np.array(known, np.uint64))

    assert found.tolist() == [known.index(value) if value in known else -1 for value in values]


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        pytest.param([7, 2, 7, -1], [(-1, [3]), (2, [1]), (7, [0, 2])], id="several"),
        pytest.param([], [], id="none"),
    ],
)
def test_rows_are_grouped_by_a_key(keys, groups):
    """Keys come ascending, the rows of each as they were."""
    found = grouped(np.array(keys, np.int64), np.arange(len(keys)))

    assert [(key, rows.tolist()) for key, rows in found] == groups


def test_every_kind_of_span_carries_its_attributes():
    """Constant ones by descriptor, numbers by row; what is not known is left out."""
    made = batch(
        (RANK_STEP, {"step": 4, "size": 90, "a": 32, "b": 2}),
        (RANK_STEP, {"step": 5, "size": 2**64 - 1, "b": -1}),
        (FORWARD, {"step": 4, "size": 1000, "a": 3, "level": Level.STEP}),
        (REDUCE, {"step": 4, "size": 64, "seq": 9, "a": 7, "b": -1, "flags": Flag.ASYNC, "source": Source.BOUND}),
        (PUSH, {"step": NO_STEP, "size": 64, "partition": 2, "level": Level.PARTITION, "flags": Flag.TRUNCATED}),
    )
    assert attributes_of(made) == [
        {"dl.step": 4, "dl.step.user": 90, "dl.batch_size": 32, "dl.epoch": 2},
        {"dl.step": 5},
        {"dl.phase": "forward", "dl.step": 4, "dl.stage.count": 3, "dl.stage.total": 1000},
        {
            "dl.comm.operation": "all_reduce",
            "dl.comm.async": True,
            "dl.comm.backend": "gloo",
            "dl.comm.group.id": "0",
            "dl.comm.group.size": 8,
            "dl.comm.dtype": "float32",
            "dl.time.source": "bound",
            "dl.step": 4,
            "dl.comm.seq": 9,
            "dl.comm.size": 64,
            "dl.queue.wait": 7,
            "dl.comm.collective_id": PINNED[3],
        },
        {
            "dl.queue.type": "PUSH",
            "dl.time.source": "host_done",
            "dl.span.truncated": True,
            "dl.comm.size": 64,
            "dl.key": 3 << 16 | 2,
            "dl.partition": 2,
        },
    ]
    assert constant_attributes(PUSH, 0, 0, "ValueError")["error.type"] == "ValueError"


def test_a_collective_is_named_alike_on_all_ranks():
    """For torch the group counts; elsewhere the tensor's name counts; a send and its receive share one id."""
    push_pull = Descriptor(s.COLLECTIVE, "push_pull", backend="byteps", tensor="grad")
    send, recv = Descriptor(s.P2P, "isend", group="0"), Descriptor(s.P2P, "recv", group="0")
    made = batch(
        (REDUCE, {"seq": 9}),
        (REDUCE, {"seq": 0}),
        (push_pull, {"seq": 2}),
        (send, {"seq": 1, "a": 6, "b": 7}),
        (FORWARD, {}),
    )
    assert collective_ids(made).tolist() == [
        *identity.collective_ids(BIND, "collective", "0", "", [9]),
        0,
        *identity.collective_ids(BIND, "collective", "", "grad", [2]),
        p2p_id(BIND, "0", 5, 6, 7, 1),
        0,
    ]
    other = batch((recv, {"seq": 1, "a": 5, "b": 7}), bind=Bind("job", "3.00ff", world="w", rank=6))
    assert collective_ids(other).tolist() == [p2p_id(BIND, "0", 5, 6, 7, 1)]


# -- numbers that variables say ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "time", "part"),
    [
        (None, 5000.0, 1.0),
        ("", 5000.0, 1.0),
        (" 0.5 ", 0.5, 0.5),
        ("1", 1.0, 1.0),
        ("0", None, 0.0),
        ("250", 250.0, None),
        *[(text, None, None) for text in ("-1", "nan", "inf", "1e400", "soon")],
    ],
)
def test_a_time_is_above_0_and_a_share_up_to_1(text, time, part):
    """What is neither is one sentence with the variable, its value, and what to write."""
    env = {} if text is None else {"NAME": text}
    told, no_time = (
        f"NAME={(text or '').strip()!r} ",
        "is not a number of milliseconds above 0: write 5000, for example",
    )
    for read, wanted, why in (
        (lambda: numbers.milliseconds(env, "NAME", 5000), time, no_time),
        (lambda: numbers.share(env, "NAME"), part, "is not a share of traces from 0 to 1"),
    ):
        if wanted is None:
            with pytest.raises(ConfigError) as caught:
                read()
            assert str(caught.value) == told + why
        else:
            assert read() == wanted
