"""Who ranks are: each start of the process group is a generation, restarts and stores that fail included."""

import itertools
import threading
import time
from pathlib import Path

import pytest

from otel_dltrace.instrument._torch import store as torch_store
from otel_dltrace.instrument._torch.binding import Binding
from otel_dltrace.instrument._torch.store import Start, bind_from_store
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer
from tests.support.processes import Place
from tests.support.torch_harness import run

pytest.importorskip("torch")


TWICE = """
import time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
for start in range(2):
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OUT']}/store{start}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    signs = [Path(os.environ["OUT"], f"done{start}.{which}") for which in range(2)]
    signs[rank].touch()
    while not all(sign.exists() for sign in signs):  # gloo resets a connection that the other side still reads
        time.sleep(0.001)
    dist.destroy_process_group()
"""


def test_each_start_of_the_process_group_is_a_generation(tmp_path: Path) -> None:
    """Started twice, one job has two generations, which both ranks know."""
    first, second = run(tmp_path, TWICE, 2)
    assert [b.generation for b in first.binds] == [b.generation for b in second.binds]
    assert [(b.generation_number, b.rank, b.world_size) for b in second.binds] == [(1, 1, 2), (2, 1, 2)]
    assert len({b.job for b in first.binds + second.binds}) == 1


TRAINED_TWICE = TWICE.replace(
    "    dist.barrier()\n",
    """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
    dist.barrier()
""",
).replace("    dist.all_reduce(torch.ones(1))\n", "")


def test_all_ranks_know_with_which_step_a_generation_begins(tmp_path: Path) -> None:
    """The last step before the process group is made anew belongs to the generation in which it was trained."""
    ranks = run(tmp_path, TRAINED_TWICE, 2)
    assert [[(b.generation_number, b.from_step) for b in rank.binds] for rank in ranks] == [[(1, 0), (2, 3)]] * 2
    assert [rank.steps() for rank in ranks] == [[*range(6)]] * 2


SUB_GROUPS_ALONE = """
import otel_dltrace
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
for _ in range(3):
    with otel_dltrace.step():
        dist.all_reduce(torch.ones(1), group=groups[rank // 2])
"""


def test_ranks_that_are_in_no_group_with_the_first_one_are_of_its_run(place: Place) -> None:
    """As on a mesh: nothing of theirs shows that rank 0 has spoken, and it spoke after they began."""
    assert binds_of(place, SUB_GROUPS_ALONE, 4) == [(1, 0), (1, 1), (1, 2), (1, 3)]


def binds_of(place: Place, program: str, ranks: int) -> list[tuple[int, int]]:
    """Return which ranks are in which start of *program*, each of which is one generation."""
    done = place.torchrun(program, ranks=ranks, OTEL_DLTRACE="1")
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    binds = {batch.process.bind for batch in place.spans()}
    assert len({bind.generation for bind in binds}) == len({bind.generation_number for bind in binds})
    return sorted((bind.generation_number, bind.rank) for bind in binds)


STOPPED_AND_ON = """
import otel_dltrace
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
otel_dltrace.stop()
dist.barrier()
otel_dltrace.instrument("torch")
for _ in range(3):
    with otel_dltrace.step():
        dist.barrier()
"""


def test_a_second_recording_knows_the_world_that_was_there(place: Place) -> None:
    """Its ranks are one run again, a later one."""
    assert binds_of(place, STOPPED_AND_ON, 2) == [(1, 0), (1, 1), (2, 0), (2, 1)]


STEPPED_TWICE = "import otel_dltrace\n" + TWICE.replace(
    "    dist.barrier()\n",
    """
    for _ in range(2):
        with otel_dltrace.step():
            dist.barrier()
""",
)


def test_what_comes_between_two_starts_of_the_process_group_has_no_id_of_the_first(tmp_path: Path) -> None:
    """The numbers begin anew: so it is in no step, and of the generation that has begun, on all ranks."""
    operations = [("all_reduce", NO_STEP, 1), ("barrier", 0, 2), ("barrier", 1, 3)]
    operations += [("all_reduce", NO_STEP, 1), ("barrier", 2, 2), ("barrier", 3, 3)]

    for rank in run(tmp_path, STEPPED_TWICE, 2):
        spans = rank.spans("collective")
        assert [(span.descriptor.name, span.step, span.seq) for span in spans] == operations
        assert rank.binds[1].from_step == 2
        assert spans[2].end <= rank.binds[1].since <= spans[3].start


OFF_AND_ON = """
import torch
import torch.distributed as dist
from otel_dltrace.instrument import registry

dist.init_process_group("gloo")
dist.barrier()
for _ in range(2):
    registry.uninstrument()
    dist.barrier()
    registry.instrument()
    dist.barrier()
"""


def test_instrumenting_anew_is_no_new_start_of_the_process_group(tmp_path: Path) -> None:
    """A world that was known stays the same generation, in the same run directory."""
    recorded = run(tmp_path, OFF_AND_ON, 2)
    assert [len(one.binds) for one in recorded] == [1, 1]
    assert recorded[0].binds[0].generation == recorded[1].binds[0].generation


RESTARTED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.broadcast(torch.ones(1), src=0)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    stop()
    os._exit(1)
dist.barrier()
"""


def test_an_elastic_restart_is_the_next_generation_of_the_same_job(tmp_path: Path) -> None:
    """All ranks are started again: one job, generation 1 then 2, and ranks agree in each, once rank 0 has sent."""
    # torch 2.13's ranks share the agent's store, where gloo finds the addresses of the first start.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    rings = run(tmp_path, RESTARTED, 2, 3, "--max-restarts", "1", **own_store)
    binds = [bind for recorded in rings for bind in recorded.binds]
    assert [(b.generation_number, b.rank, b.attempt) for b in binds] == [(1, 0, 0), (1, 1, 0), (2, 0, 1), (2, 1, 1)]
    assert len({b.job for b in binds}) == 1
    assert len({b.generation for b in binds}) == 2


def test_a_store_that_outlives_a_restart_counts_it(tmp_path: Path) -> None:
    """Below the prefixes of each start is one store: the number goes on, what was said then is not read again."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    told = []
    for attempt in range(2):
        recorders = [Recorder(tmp_path / f"{attempt}{rank}", 1 << 20) for rank in range(2)]
        bindings = [Binding(Tracer(recorder), itertools.count(1)) for recorder in recorders]
        for rank, binding in reversed(list(enumerate(bindings))):
            binding.initialised(dist.PrefixStore("default_pg", store), rank, 2)
        assert recorders[1].bound is None
        bindings[1].met()
        told.append([recorder.bound for recorder in recorders])
    assert [[(b.generation_number, b.rank) for b in binds] for binds in told] == [[(1, 0), (1, 1)], [(2, 0), (2, 1)]]
    assert [len({b.generation for b in binds}) for binds in told] == [1, 1]
    assert len({b.job for binds in told for b in binds}) == 1


def test_what_was_said_before_a_process_began_is_not_believed_before_it_has_met_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of an earlier start; what was said since is of this one."""
    dist = pytest.importorskip("torch.distributed")
    store, tracers = dist.HashStore(), [Tracer(Recorder(tmp_path / str(rank), 1 << 20)) for rank in range(2)]
    assert bind_from_store(tracers[0], Start(store, 0, 2))
    with monkeypatch.context() as patched:
        patched.setattr(torch_store, "process_began", lambda: time.time() + 1)
        assert not bind_from_store(tracers[1], Start(store, 1, 2), has_met=False)
    assert bind_from_store(tracers[1], Start(store, 1, 2), has_met=False)
    assert tracers[0].recorder.bound.generation == tracers[1].recorder.bound.generation


def test_a_store_that_is_gone_leaves_the_process_unbound(tmp_path: Path) -> None:
    """No answer, no error: the environment will say who we are."""

    class Gone:
        def check(self, _keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    recorder = Recorder(tmp_path, 1 << 20)
    assert bind_from_store(Tracer(recorder), Start(Gone(), 1, 2))
    assert recorder.bound is None


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """Its process may be frozen: what it is asked on another thread may stay unanswered."""
    answers = threading.Event()

    class Frozen:
        def check(self, _keys: list[str]) -> bool:
            return answers.wait(60)

    recorder = Recorder(tmp_path, 1 << 20)
    begun = time.monotonic()
    assert bind_from_store(Tracer(recorder), Start(Frozen(), 1, 2), patience_s=0.1)
    assert (recorder.bound, time.monotonic() - begun < 30) == (None, True)
    answers.set()


def test_a_job_named_by_its_environment_keeps_its_name(tmp_path: Path) -> None:
    """What the launcher calls the job is its id."""
    (recorded, _) = run(tmp_path, TWICE, 2, JOB_UID="nightly")
    assert {bind.job for bind in recorded.binds} == {"nightly"}
