"""Real Horovod over MPI and Gloo: every operation of every rank is a span that begins when that rank called."""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.analysis.collectives.joined import join
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import collective_ids
from otel_dltrace.model.identity import NO_STEP, trace_id
from otel_dltrace.model.spans import SpanBatch
from tests.support import horovod_job, servers
from tests.support.horovod_job import GRADIENTS, by_rank, need
from tests.support.processes import Place, a_place

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(2400)  # the first test may have to build Horovod

MS = 1_000_000
STEPS = 8


JOBS = [("mpi", 2), ("gloo", 2), ("mpi", 4), ("gloo", 4)]
Ran = tuple[Place, list[SpanBatch]]


@pytest.fixture(scope="module", params=JOBS, ids=["mpi-2", "gloo-2", "mpi-4", "gloo-4"])
def runs(
    request: pytest.FixtureRequest, horovod_site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Iterator[Ran]]:
    """Runs of the program on its ranks: what each wrote down, and its spans."""
    controller, ranks = request.param
    need(controller)
    with ExitStack() as stack:

        def run() -> Iterator[Ran]:
            while True:
                place = stack.enter_context(a_place(tmp_path_factory.mktemp(controller)))
                horovod_job.run(place, horovod_site, controller, ranks, str(STEPS))
                yield place, by_rank(place, ranks)

        yield run()


@pytest.fixture(scope="module")
def ran(runs: Iterator[Ran]) -> Ran:
    """The first of them."""
    return next(runs)


def operations(batch: SpanBatch) -> dict[str, SpanBatch]:
    """Return the operations of each tensor, by start."""
    ours = batch.take(batch.is_kind(s.COLLECTIVE))
    ours = ours.take(np.argsort(ours["start"], kind="stable"))
    tensors = ours.lookup(lambda d: d.tensor, object)
    return {tensor: ours.take(tensors == tensor) for tensor in dict.fromkeys(tensors.tolist())}


def test_an_operation_begins_when_its_rank_called(ran: Ran, runs: Iterator[Ran]) -> None:
    """The ranks' own logs say so to a millisecond for 99 of 100, those that Horovod's cache answered among them."""
    shares = [share_in_time(*ran)]
    while shares[-1] < 0.99 and len(shares) < 3:  # a rank may lose the processor between its log's clock and ours
        shares.append(share_in_time(*next(runs)))
    assert shares[-1] >= 0.99, shares


def share_in_time(place: Place, batches: list[SpanBatch]) -> float:
    """Return how many of all operations begin within a millisecond of what the log says; all must be in both."""
    apart = []
    for batch in batches:
        log, found = horovod_job.logged(place, batch.rank), operations(batch)
        sizes = {tensor: [size for size, _, _ in calls] for tensor, calls in log.items()}
        assert {tensor: part["size"].tolist() for tensor, part in found.items()} == sizes
        for tensor, calls in log.items():
            for start, (_, before, after) in zip(found[tensor]["start"].tolist(), calls, strict=True):
                apart.append(max(before - start, start - after, 0))
    assert len(apart) > 150 * len(batches)
    return float(np.mean(np.array(apart) < MS))


def test_an_operation_has_one_id_on_all_its_ranks(ran: Ran) -> None:
    """Each id is found once on every rank of its process set, for one tensor; a set's number may come again."""
    _, batches = ran
    seen = defaultdict(list)
    for batch in batches:
        ours = batch.take(batch.is_kind(s.COLLECTIVE))
        for row, number in enumerate(collective_ids(ours).tolist()):
            d = ours.descriptor_of(row)
            seen[number].append((d.tensor, d.name, d.group, d.group_size, batch.rank))
    assert 0 not in seen
    assert [them for them in seen.values() if len({one[:-1] for one in them}) != 1] == []
    assert [them for them in seen.values() if len({one[-1] for one in them}) != len(them)] == []
    assert [them for them in seen.values() if len(them) != them[0][3]] == []
    assert {them[0][2] for them in seen.values()} == {"0", "1", "1.1"}


def test_unnamed_tensors_grow_no_table(ran: Ran) -> None:
    """A hundred and fifty unnamed operations have one descriptor; their handles number them, alike on all ranks."""
    _, batches = ran
    tables = [[d.tensor for d in batch.descriptors if d.tensor.startswith("allreduce.noname")] for batch in batches]
    numbers = [operations(batch)["allreduce.noname.N"]["seq"].tolist() for batch in batches]
    assert tables == [["allreduce.noname.N"]] * len(batches)
    assert numbers == [numbers[0]] * len(batches)
    assert len(set(numbers[0])) == 150


def test_the_gradients_are_in_their_steps(ran: Ran) -> None:
    """A step's hooks reduce each gradient once; they are asynchronous, and all ranks are in the same run."""
    _, batches = ran
    for batch in batches:
        found = operations(batch)
        assert [found[tensor]["step"].tolist() for tensor in GRADIENTS] == [[*range(STEPS)]] * 4
        assert [found[tensor]["seq"].tolist() for tensor in GRADIENTS] == [[*range(1, STEPS + 1)]] * 4
        assert all((found[tensor]["flags"] & s.Flag.ASYNC).all() for tensor in GRADIENTS)
        assert (found["allreduce.a"]["flags"] & s.Flag.ASYNC).tolist() == [0]
        assert (found["broadcast.c"]["b"].tolist(), found["allreduce.a"]["step"].tolist()) == ([1], [NO_STEP])
    binds = [batch.process.bind for batch in batches]
    assert {(b.job, b.generation, b.world_size) for b in binds} == {(binds[0].job, binds[0].generation, len(binds))}


def test_no_rank_is_said_to_have_drifted(ran: Ran) -> None:
    """What ranks do in process sets that others are not in says nothing of their steps."""
    _, batches = ran
    assert [began_at(batch) for batch in batches] == [began_at(batches[0])] * len(batches)
    assert len(set(began_at(batches[0]).values()) - {0}) == STEPS


def began_at(batch: SpanBatch) -> dict[int, int]:
    """Return how many operations of all ranks had been when each step of a rank began."""
    steps = batch.take(batch.is_rank_step)
    return dict(zip(steps["step"].tolist(), steps["seq"].tolist(), strict=True))


UNEVEN = """
import otel_dltrace, torch, horovod.torch as hvd
hvd.init()
for i in range(3 + hvd.rank()):
    hvd.allreduce(torch.ones(4), name="x")
hvd.join()
for i in range(2):
    with otel_dltrace.step():
        hvd.allreduce(torch.ones(4), name="x")
"""


def test_ranks_that_join_early_have_not_drifted(place: Place, horovod_site: Path) -> None:
    """A rank with fewer batches was in fewer operations, and goes on from the same number as the others."""
    command = [*horovod_job.TRACED, *horovod_job.launcher("gloo", 2), sys.executable, str(place.write(UNEVEN))]
    done = place.finish(place.popen(command, **horovod_job.environment(horovod_site)), horovod_job.ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [began_at(batch) for batch in by_rank(place, 2)] == [{0: 1 << 20, 1: (1 << 20) + 1}] * 2


ELASTIC = """
import pathlib, sys, time, torch
import otel_dltrace
import horovod.torch as hvd
from horovod.common.elastic import ObjectState

hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, batch=0, met=0)

@hvd.elastic.run
def train(state):
    while hvd.size() < 3 or state.batch < state.met + 5:
        with otel_dltrace.step():
            hvd.allreduce(torch.ones(4), name="x")
        time.sleep(0.02)
        state.batch += 1
        state.met = state.batch if hvd.size() < 3 else state.met
        if state.batch == 10 and hvd.rank() == 0:
            pathlib.Path("grow").touch()
        state.commit()

train(state)
"""


def test_a_rank_that_joins_an_elastic_job_is_in_the_others_run(place: Place, horovod_site: Path) -> None:
    """From the reset on all three are in one generation, at one step, with one id for what they do together."""
    need("gloo")
    discover = place.write("#!/bin/sh\n[ -e grow ] && echo localhost:3 || echo localhost:2\n", "discover.sh")
    discover.chmod(0o755)
    elastic = ["-np", "2", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discover)]
    program = [sys.executable, str(place.write(ELASTIC))]
    command = [*horovod_job.TRACED, *horovod_job.GLOO, *elastic, "--network-interfaces", "lo", *program]
    done = place.finish(place.popen(command, **horovod_job.environment(horovod_site)), horovod_job.ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr

    later = [batch for batch in place.spans() if batch.process.bind.generation_number == 2]
    assert sorted(batch.rank for batch in later) == [0, 1, 2]
    newcomer = next(batch for batch in later if batch.rank == 2)
    steps = set(began_at(newcomer))
    assert (min(steps) >= 10, len(steps)) == (True, 5)
    called = [set(collective_ids(operations(batch)["allreduce.x"]).tolist()) for batch in later]
    assert len(called[0] & called[1] & called[2]) == 5


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_late_rank_is_named(place: Place, horovod_site: Path, controller: str) -> None:
    """The rank that sleeps 100 ms before each step comes last to 95 of 100 of its gradients, by about as much."""
    need(controller)
    steps = 10
    horovod_job.run(place, horovod_site, controller, 2, str(steps), "late", "1", "100")
    joined = join(by_rank(place, 2))
    joined = joined.take(np.array([d.tensor in GRADIENTS for d in joined.descriptors]))
    starts, ranks, of = (joined[name].reshape(-1, 2) for name in ("start", "rank", "step"))
    last = ranks[np.arange(len(starts)), np.argmax(starts, axis=1)]
    logs = [horovod_job.logged(place, rank) for rank in range(2)]
    called = [[log[d.tensor][step][1] for log in logs] for d, step in zip(joined.descriptors, of[:, 0], strict=True)]
    is_late = np.diff(called)[:, 0] > 0  # on a busy machine the other one may be later still
    assert (len(last), is_late.sum() > 2 * steps) == (4 * steps, True)
    assert np.mean(last[is_late] == 1) >= 0.95
    assert np.median(starts.max(axis=1) - starts.min(axis=1)) > 10 * MS

    done = place.command("report", str(place.runs()[0]), "--by", "negotiation", "--json")
    found = json.loads(done.stdout)
    assert (found["called"], found["coordinated"], found["whole"]["steps"]) == (True, False, 2 * steps)
    said = {tensor["tensor"]: (tensor["last"], tensor["ticked"]) for tensor in found["tensors"]}
    assert [said[tensor] for tensor in GRADIENTS] == [(1, steps)] * 4


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_killed_run_is_recovered(place: Place, horovod_site: Path, controller: str) -> None:
    """All that was called before a SIGKILL in the middle of a step is there; what was open is marked as cut off."""
    need(controller)
    horovod_job.run(place, horovod_site, controller, 2, str(STEPS), "killed", "1", ends=False)
    killed = by_rank(place, 2)[1]
    found = {tensor: len(part) for tensor, part in operations(killed).items()}
    assert found == {tensor: len(calls) for tensor, calls in horovod_job.logged(place, 1).items()}
    last = killed.take(killed["step"] == STEPS - 1)
    cut = Counter(
        last.take(last["flags"] & s.Flag.TRUNCATED != 0).lookup(lambda d: d.tensor or d.name, object).tolist()
    )
    assert cut == Counter([*GRADIENTS, s.RANK_STEP])


def test_a_step_is_one_trace_in_the_collector(place: Place, horovod_site: Path, tmp_path: Path) -> None:
    """The collector has each span of the steps once, both ranks' in one trace, joined by the collective's id."""
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "OTEL_DLTRACE_STEPS": "all"}
        horovod_job.run(place, horovod_site, "gloo", 2, str(STEPS), **env)
        place.deliver(**env)
        batches = by_rank(place, 2)
        spans = collector.wait_for(sum(len(batch) for batch in batches) + STEPS)
    assert len({span.span_id for span in spans}) == len(spans)
    traces = defaultdict(list)
    for span in spans:
        if span.name == "allreduce":
            said = servers.attributes(span)
            if said[s.DL_TENSOR_NAME] == GRADIENTS[0]:
                traces[span.trace_id.hex()].append(said[s.DL_COMM_COLLECTIVE_ID])
    bind = batches[0].process.bind
    assert set(traces) == {f"{trace_id(bind, step):032x}" for step in range(STEPS)}
    assert [len(ids) for ids in traces.values()] == [2] * STEPS
    assert all(len(set(ids)) == 1 for ids in traces.values())


ALONE = """
import torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(4), name="x")
"""


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_ranks_agree_on_a_run_that_nobody_named(place: Place, horovod_site: Path, controller: str) -> None:
    """Through horovodrun's own server, or by what mpirun says; without `otel-dltrace run`."""
    need(controller)
    command = [*horovod_job.launcher(controller, 2), sys.executable, str(place.write(ALONE))]
    env = horovod_job.environment(horovod_site) | {"OTEL_DLTRACE": "1"}
    done = place.finish(place.popen(command, **env), horovod_job.ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    place.wait_for_rings()
    binds = [batch.process.bind for batch in by_rank(place, 2)]
    assert len({(bind.job, bind.generation) for bind in binds}) == 1


def test_programs_that_a_script_starts_by_themselves_are_runs_of_their_own(place: Place, horovod_site: Path) -> None:
    """Each is rank 0 of 1 of its Horovod, and would have the other's ids."""
    need("mpi")
    python = f"{sys.executable} {place.write(ALONE)}"
    command = [*horovod_job.TRACED, "sh", "-c", f"{python} && {python}"]
    done = place.finish(place.popen(command, **horovod_job.environment(horovod_site)), horovod_job.ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({number for batch in place.spans() for number in collective_ids(operations(batch)["allreduce.x"])}) == 2


HALVES = """
import os, torch, horovod.torch as hvd
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
hvd.init(comm=[0, 2] if rank % 2 == 0 else [1, 3])
hvd.allreduce(torch.ones(4), name="x")
"""


def test_ranks_that_horovod_divides_stay_apart(place: Place, horovod_site: Path) -> None:
    """Each half has a Horovod of its own with ranks 0 and 1; in the run they are mpirun's, and share no operation."""
    need("mpi")
    command = [*horovod_job.TRACED, *horovod_job.launcher("mpi", 4), sys.executable, str(place.write(HALVES))]
    done = place.finish(place.popen(command, **horovod_job.environment(horovod_site)), horovod_job.ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [operations(batch)["allreduce.x"] for batch in by_rank(place, 4)]
    assert [one.descriptor_of(0).group for one in found] == ["0", "0@1", "0", "0@1"]
    ids = [collective_ids(one).tolist() for one in found]
    assert (ids[0], ids[1]) == (ids[2], ids[3])
    assert ids[0] != ids[1]
