"""What a server did in a step that was slow on a rank: it goes out with that step, where one drain serves both."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from otel_dltrace.export import drain as drain_module
from otel_dltrace.export import follower as follower_module
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.outgoing import served as served_module
from otel_dltrace.export.outgoing.gate import SETTLE_S, Outgoing, StepGate
from otel_dltrace.export.outgoing.outlets import Outlets
from otel_dltrace.export.outgoing.served import SlowHere
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.plan import Window, for_servers, share_of
from otel_dltrace.model.semconv import PHASE, PUSH, Flag, Level
from otel_dltrace.model.spans import SpanBatch, empty_rows, stack_rows
from otel_dltrace.record.recorder import Recorder
from tests.support.processes import Place, abandon

SERVER = Bind("job", "1.00", role="server", world_size=2, servers=1)


def a_gate(slow: SlowHere, window: str = "0-0", budget: int = 0, bind: Bind = SERVER) -> StepGate:
    """Return a server's gate."""
    return StepGate(bind, Window.parse(window), budget, lambda _: empty_rows(), slow_here=slow)


def add(gate: StepGate, step: int, *ranks: int, now: float = 0.0) -> None:
    """Have the server be asked once in *step* by each of *ranks*."""
    rows = empty_rows(len(ranks))
    rows["step"], rows["b"], rows["level"] = step, ranks, Level.PARTITION
    gate.add(rows, np.zeros(len(rows), bool), now)


def due(gate: StepGate, now: float = SETTLE_S, final: bool = False) -> list[tuple[int, list[int], int]]:
    """Return step, ranks and spans left out of what is decided."""
    return [(out.step, out.rows["b"].tolist(), out.left_out) for out in gate.due(now, final)]


def test_what_a_server_did_waits_for_the_ranks_that_are_here():
    """Also when the server has ended: its drain waits for the worker. Each rank's part goes its own way."""
    slow = SlowHere()
    slow.deciding = {0, 1}
    gate = a_gate(slow)
    add(gate, 5, 0, 1)
    assert due(gate) == due(gate, 60.0) == due(gate, 60.0, final=True) == []
    assert gate.undecided_from() == 5

    slow.note(0, 5, slow=True)
    assert due(gate, 60.0) == [(5, [0], 0)]
    slow.note(1, 5, slow=False)
    assert due(gate, 60.0) == [(5, [], 1)]
    assert gate.undecided_from() == NO_STEP
    add(gate, 5, 0, 1, now=70.0)
    assert due(gate, 80.0) == [(5, [0], 1)], "what comes later goes the same way"


def test_in_the_window_nobody_is_waited_for():
    """Nor for who has no part in a step, whatever becomes of it."""
    slow = SlowHere()
    slow.deciding = set(range(40))
    gate = a_gate(slow)
    add(gate, 0, 0, 1)
    assert due(gate) == [(0, [0, 1], 0)]

    gate = a_gate(slow, budget=800, bind=replace(SERVER, world_size=40, servers=4))
    idle = [rank for rank in range(40) if not share_of(rank, 40, 4, 800, 5).full]
    add(gate, 5, *idle)
    assert sum(left_out for _, _, left_out in due(gate)) == len(idle)


def test_a_server_sends_no_more_of_a_step_for_a_rank_than_its_share():
    """However often it is asked, and in as many pieces."""
    budget = 4096
    step = next(step for step in range(9) if share_of(0, 2, 1, budget, step).full)
    limit = for_servers(share_of(0, 2, 1, budget, step), 1)
    gate = a_gate(SlowHere(), "all", budget)
    sent = []
    for _ in range(3):
        add(gate, step, *[0] * (limit // 2 + 1))
        sent += [(len(ranks), left_out) for _, ranks, left_out in due(gate)]
    half = limit // 2 + 1
    assert sent == [(half, 0), (limit - half, 2 * half - limit), (0, half)]


def test_what_a_server_did_hangs_under_what_its_rank_has_room_for():
    """Within a budget that is known once the step is over, also of a step in the window: it is waited for."""
    slow, budget = SlowHere(), 100
    slow.deciding = {0}
    step = next(step for step in range(9) if share_of(0, 2, 1, budget, step).full)
    server, worker = (a_gate(slow, "0-9", budget, bind) for bind in (SERVER, replace(SERVER, role="worker")))
    rows = empty_rows(budget)
    rows["step"], rows["level"], rows["span_id"], rows["parent_id"] = step, Level.PARTITION, np.arange(10, 110), 7
    worker.add(rows, np.arange(budget) == 0, 0.0)
    asked = empty_rows(1)
    asked["step"], asked["level"], asked["parent_id"] = step, Level.PARTITION, 42
    server.add(asked, np.zeros(1, bool), 0.0)
    assert server.due(60.0) == []

    (sent,) = worker.due(60.0)
    slow.note(0, step, sent.slow, worker.left_out(step))
    (served,) = server.due(60.0)
    assert (sent.rows["span_id"].tolist(), served.rows["parent_id"].tolist()) == ([], [7])


@pytest.mark.parametrize(
    ("deciding", "decided"),
    [
        pytest.param((1,), [], id="on another host"),
        pytest.param((), [(0, 4)], id="gone"),
        pytest.param((0,), [(0, 6), (0, 4)], id="here and past it"),
    ],
)
def test_who_cannot_say_more_is_not_waited_for(deciding, decided):
    """The window alone tells then, after two seconds."""
    slow = SlowHere()
    slow.deciding = deciding
    for rank, step in decided:
        slow.note(rank, step, slow=False)
    gate = a_gate(slow)
    add(gate, 5, 0)

    assert due(gate, SETTLE_S / 2) == []
    assert due(gate) == [(5, [], 1)]


def test_a_step_that_is_long_past_is_no_longer_slow(monkeypatch):
    """A month of slow steps is not a month of memory, and a step that is huge is not held as a whole."""
    monkeypatch.setattr(served_module, "_REMEMBERED", 10)
    monkeypatch.setattr(served_module, "MAX_WAITING", 3)
    slow = SlowHere()
    slow.deciding = {0, 1}
    for step in range(20):
        slow.note(0, step, slow=True)
    assert [slow.is_slow(0, step) for step in (9, 10, 19, 20)] == [False, True, True, None]

    gate = a_gate(slow)
    add(gate, 20, 0, 1, 0)
    assert due(gate) == []
    add(gate, 20, 1)
    assert due(gate, 2 * SETTLE_S) == [(20, [], 2)]
    assert gate.undecided_from() == 20


# -- one drain ---------------------------------------------------------------------------------

USUAL_NS, LONG_NS = 10_000_000, 99_000_000
LONG = 5
"""The step that is slow; those before it are not."""


class Process:
    """A worker or a server of one job, as far as it records."""

    def __init__(self, rings: Path, **who: Any) -> None:
        bind = Bind("job", "1.00", world_size=2, servers=1, **who)
        self.recorder = Recorder(rings, 1 << 20, Level.PARTITION, {"bind": bind.fields()})
        self.recorder.bind(bind)
        self.rank_step, self.push = (self.recorder.intern(it) for it in (RANK_STEP, Descriptor(PHASE, PUSH)))

    def ask(self, server: "Process", step: int) -> None:
        """Push in *step*, which *server* answers."""
        self.recorder.span(self.push, Level.PARTITION, 1, 2, step=step)
        server.answer(step, rank=0)

    def answer(self, step: int, rank: int) -> None:
        """Answer a push that *rank* made in *step*."""
        recorder, number = self.recorder, self.recorder.number()
        recorder.remote_parent(number, Level.PARTITION, b"\x11" * 16, b"\x22" * 8, step, rank)
        recorder.span(self.push, Level.PARTITION, 1, 2, b=rank, flags=Flag.REMOTE, number=number, step=NO_STEP)

    def end(self, step: int, took: int = USUAL_NS) -> None:
        """End *step*, which took so many ns."""
        start = step * LONG_NS
        self.recorder.span(self.rank_step, Level.STEP, start, start + took, b=-1, step=step)


class Kept(Outlets):
    """Remembers which steps went out in full, by role."""

    def __init__(self) -> None:
        super().__init__(None, [])
        self.sent: dict[str, set[int]] = {"worker": set(), "server": set()}

    def send(self, batch: SpanBatch, outgoing: Sequence[Outgoing]) -> None:
        """Take *outgoing*."""
        assert batch.process.bind is not None
        rows = stack_rows(out.rows for out in outgoing)
        self.sent[batch.process.bind.role] |= set(rows["step"][rows["level"] > Level.STEP].tolist())


class Host:
    """A drain with a clock set by hand; a worker that has ended its first five steps, and a server."""

    def __init__(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept, self.now = Kept(), 0.0
        self.worker, self.server = Process(place.rings), Process(place.rings, role="server")
        self.living = {self.worker, self.server}
        for step in range(LONG):
            self.worker.ask(self.server, step)
            self.worker.end(step)
        clock = SimpleNamespace(monotonic=lambda: self.now, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
        monkeypatch.setattr(drain_module, "time", clock)
        monkeypatch.setattr(follower_module, "writer_is_alive", self._is_alive)
        self.drain = Drain(Serving(place.rings, place.folder, window=Window.parse("0-0")), self.kept)

    def _is_alive(self, fd: int) -> bool:
        # Its lock would say nothing within one process.
        return os.fstat(fd).st_ino in {p.recorder.ring.path.stat().st_ino for p in self.living}

    def wait(self, seconds: int) -> dict[str, set[int]]:
        """Have the drain turn once a second; return which steps have gone out in full by then."""
        for _ in range(seconds):
            self.now += 1.0
            self.drain.tick()
        return self.kept.sent


@pytest.fixture
def host(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Give a host; end its drain."""
    it = Host(place, monkeypatch)
    yield it
    it.living.clear()
    it.wait(5)
    assert not it.drain.followers, "no ring stays"
    it.drain.finish()


def test_the_servers_part_of_a_slow_step_waits_for_its_end(host):
    """However long that takes; of a usual step nothing goes out, and of the window's step it has gone out before."""
    host.worker.ask(host.server, LONG)
    assert host.wait(60) == {"worker": {0}, "server": {0}}

    host.worker.end(LONG, LONG_NS)
    host.worker.ask(host.server, LONG + 1)
    host.worker.end(LONG + 1)
    assert host.wait(15) == {"worker": {0, LONG}, "server": {0, LONG}}


@pytest.mark.parametrize("first", ["worker", "server", "both"])
def test_who_dies_in_a_slow_step_leaves_it_whole(host, first):
    """Whoever is gone first: what a server that has ended left waits for the worker, and its ring stays as long."""
    host.worker.recorder.begin(host.worker.rank_step, Level.STEP, LONG * LONG_NS, step=LONG)
    host.worker.ask(host.server, LONG)
    host.worker.recorder.span(host.worker.push, Level.PARTITION, LONG * LONG_NS, LONG * LONG_NS + LONG_NS, step=LONG)
    host.wait(2)
    gone = {"worker": {host.worker}, "server": {host.server}, "both": set(host.living)}[first]
    host.living -= gone
    sent = host.wait(20)
    if first == "server":
        assert sent == {"worker": {0}, "server": {0}}
        assert len(host.drain.followers) == 2
        host.living.clear()
        host.wait(2)

    assert sent == {"worker": {0, LONG}, "server": {0, LONG}}
    assert len(host.drain.followers) == (first == "worker")


def test_of_a_rank_that_is_elsewhere_the_window_tells(host):
    """Nobody here will ever know more of it."""
    host.server.answer(LONG, rank=1)
    host.server.answer(0, rank=1)
    host.wait(15)

    (server,) = (m for f in host.drain.followers.values() for m in f.members if m.bind.role == "server")
    assert (host.kept.sent["server"], server.left_out, server.gate.undecided_from()) == ({0}, LONG, NO_STEP)


def test_a_step_that_its_rank_has_lost_holds_no_ring_up(host):
    """The worker is gone, and of this step it left nothing."""
    host.server.answer(LONG, rank=0)
    host.wait(10)
    host.living.clear()
    sent = host.wait(1)

    assert (sent["server"], host.drain.followers) == ({0}, {})


def test_a_drain_that_follows_a_killed_one_waits_on(host):
    """What waited is held again; a rank's last steps are not known to it, so this one is not slow for anybody.

    What the first one has left out it does not read again.
    """
    host.worker.ask(host.server, LONG)
    host.wait(20)
    abandon(host.drain)
    host.drain = Drain(host.drain.serving, host.kept)
    host.wait(20)
    (server,) = (m for f in host.drain.followers.values() for m in f.members if m.bind.role == "server")
    assert server.gate.undecided_from() == LONG

    host.worker.end(LONG, LONG_NS)
    sent = host.wait(15)
    assert (sent, server.left_out) == ({"worker": {0}, "server": {0}}, 1)
