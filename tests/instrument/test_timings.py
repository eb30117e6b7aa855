"""Where a step's time goes: what is planted in a stage is found in it, nowhere twice, and adds up to the step."""

import importlib.util
from pathlib import Path

import pytest

from otel_dltrace.instrument._loop import Loop
from otel_dltrace.model.semconv import CHECKPOINT
from otel_dltrace.record.steps import Steps
from tests.support.processes import a_place
from tests.support.torch_harness import read_ring, run, run_each
from tests.support.torch_loops import PLAIN, PLANTED, SETUP, Ran, assert_adds_up, inside, totals

if not importlib.util.find_spec("torch"):
    pytest.skip("needs torch", allow_module_level=True)


SLOW = """
import time
from otel_dltrace import phase, step

def sleep():
    time.sleep(0.05)

class Late(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        sleep()
        return gradient

class SlowModel(nn.Sequential):
    def forward(self, x):
        sleep()
        return Late.apply(super().forward(x))

class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        sleep()
        return super().step(closure)

class SlowState:
    def __reduce__(self):
        sleep()
        return dict, ()

def slowly(batch):
    sleep()
    return torch.utils.data.default_collate(batch)

def save(*more):
    torch.save([model.state_dict(), SlowState(), *more], io.BytesIO())
"""
PROGRAMS = {
    "each stage": """
        import io
        slow = SlowModel(*model)
        sgd = SlowSGD(slow.parameters(), lr=0.1)
        plan = torch.optim.lr_scheduler.LambdaLR(sgd, lambda epoch: time.sleep(0.05) or 1.0)
        for x, y in DataLoader(data, batch_size=10, collate_fn=slowly):
            with phase("to_device"):
                sleep()
            sgd.zero_grad()
            loss = loss_of(x, y, slow)
            loss.backward()
            sgd.step()
            plan.step()
            with phase("from_device"):
                sleep()
                loss.item()
            with phase("reduce_metrics"):
                sleep()
            save()
    """,
    "schedulers of classes of its own": """
        class Longer(torch.optim.lr_scheduler.StepLR):
            def step(self, epoch=None):
                sleep()
                super().step(epoch)

        class Own(torch.optim.lr_scheduler.LRScheduler):
            def step(self, epoch=None):
                sleep()

        class OnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
            def step(self, metrics, epoch=None):
                sleep()
                super().step(metrics, epoch)

        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        plans = Longer(sgd, 1), Own(sgd), OnPlateau(sgd)
        for x, y in DataLoader(data, batch_size=12):
            sgd.zero_grad()
            loss_of(x, y).backward()
            sgd.step()
            for plan in plans:
                plan.step(*[1.0] * (plan is plans[2]))
    """,
    "accumulated": """
        slow = SlowModel(*model)
        sgd = torch.optim.SGD(slow.parameters(), lr=0.1)
        for number, (x, y) in enumerate(loader):
            loss_of(x, y, slow).backward()
            if number % 3 == 2:
                sgd.step()
                sgd.zero_grad()
    """,
    "blocks around what is seen anyway": """
        slow = SlowModel(*model)
        for x, y in DataLoader(data, batch_size=12):
            with phase("forward"):
                sleep()
                loss = loss_of(x, y, slow)
            with phase("backward"):
                loss.backward()
            with phase("optimizer"):
                optimizer.step()
            with phase("evaluate"):
                sleep()
                evaluate()
    """,
    "to the device while fetching": """
        def move(batch):
            with phase("to_device"):
                sleep()
            return torch.utils.data.default_collate(batch)

        for x, y in DataLoader(data, batch_size=12, collate_fn=move):
            learn(x, y)
    """,
    "a checkpoint after an evaluation": """
        import io
        for epoch in range(2):
            for x, y in DataLoader(data, batch_size=12):
                learn(x, y)
            evaluate()
            save()
    """,
    "a checkpoint in another thread": """
        import io, threading
        for x, y in DataLoader(data, batch_size=12):
            learn(x, y)
            thread = threading.Thread(target=save)
            thread.start()
            thread.join()
    """,
    "a checkpoint that fails": """
        import io
        for x, y in DataLoader(data, batch_size=12):
            learn(x, y)
            try:
                save(lambda: None)
            except Exception:
                save()
    """,
    "a distributed checkpoint": """
        import tempfile, warnings
        import torch.distributed.checkpoint as dcp
        warnings.simplefilter("ignore")
        for x, y in DataLoader(data, batch_size=12):
            learn(x, y)
            with tempfile.TemporaryDirectory() as folder:
                dcp.save(model.state_dict(), checkpoint_id=folder)
            with tempfile.TemporaryDirectory() as folder:
                dcp.async_save(model.state_dict(), checkpoint_id=folder).result()
    """,
    "an evaluation of one batch": """
        one = DataLoader(data, batch_size=24)
        for epoch in range(2):
            for x, y in DataLoader(data, batch_size=12):
                learn(x, y)
            for x, y in one:
                with phase("to_device"):
                    sleep()
                with torch.no_grad():
                    model(x)
    """,
    "told": """
        for number in range(3):
            with step(number, batch_size=7):
                learn(*data[:12])
    """,
    "marked": """
        for x, y in DataLoader(data, batch_size=10):
            with step():
                learn(x, y)
    """,
}

BESIDE = {
    "a copy in another thread": """
        import threading

        def copy(begun, over):
            with phase("to_device"):
                begun.set()
                over.wait()

        for x, y in DataLoader(data, batch_size=12):
            begun, over = threading.Event(), threading.Event()
            thread = threading.Thread(target=copy, args=(begun, over))
            thread.start()
            begun.wait()
            sleep()
            learn(x, y)
            over.set()
            thread.join()
    """,
}
"""With stages of other threads, which are beside the step's."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What each program recorded, and whether it computed the same untraced."""
    return run_each(tmp_path_factory.mktemp("timings"), SETUP + SLOW, PROGRAMS | BESIDE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_stages_of_a_step_add_up_to_no_more_than_the_step(name: str, ran: Ran) -> None:
    """Each moment counts once, whatever is inside of what; and what is learned stays the same."""
    recorded, same = ran[name]

    assert_adds_up(recorded)
    assert recorded.steps()
    assert same


def test_what_is_planted_in_a_stage_is_found_in_it(ran: Ran) -> None:
    """50 ms in each, in every step, and the last batch is a smaller one."""
    recorded = ran["each stage"][0]
    slow = set(PLAIN) - {"prepare_batch"} | {
        "to_device",
        "step_lr_schedulers",
        "from_device",
        "reduce_metrics",
        "checkpoint",
    }
    found = totals(recorded)

    assert [step.a for step in recorded.spans("step")] == [10, 10, 4]
    assert list(found) == [0, 1, 2]
    for stages in found.values():
        assert {name for name, ns in stages.items() if ns >= PLANTED} >= slow
        assert set(stages) - slow == {"prepare_batch"}
    for stages in inside(recorded).values():
        gap, copy = ({stage.name: stage for stage in stages}[name] for name in ("prepare_batch", "to_device"))
        # The planted copy is between batch and forward, and is not counted twice.
        assert gap.start <= copy.start <= copy.end <= gap.end
        assert gap.size == gap.end - gap.start - copy.size


def test_what_another_thread_marks_ends_no_gap(ran: Ran) -> None:
    """From the batch to the forward, though a thread has begun to copy another one meanwhile."""
    recorded = ran["a copy in another thread"][0]

    assert [recorded.stages(step) for step in recorded.steps()] == [PLAIN | {"to_device": 1}] * 2
    assert min(stages["prepare_batch"] for stages in totals(recorded).values()) >= PLANTED


def test_a_scheduler_s_own_step_is_one_piece_with_the_one_that_it_calls(ran: Ran) -> None:
    """Whether torch's is called within or not."""
    recorded = ran["schedulers of classes of its own"][0]

    assert [recorded.stages(step)["step_lr_schedulers"] for step in recorded.steps()] == [3, 3]
    assert min(stages["step_lr_schedulers"] for stages in totals(recorded).values()) >= 3 * PLANTED


def test_accumulated_pieces_add_up(ran: Ran) -> None:
    """Three batches an optimizer step: one span each, with count and sum, and the samples of all three."""
    recorded = ran["accumulated"][0]
    three = dict.fromkeys(PLAIN, 3)

    assert [recorded.stages(step) for step in recorded.steps()] == [three | {"optimizer": 1}] * 2
    assert [step.a for step in recorded.spans("step")] == [12, 12]
    for stages in totals(recorded).values():
        assert stages["forward"] >= 3 * PLANTED
        assert stages["backward"] >= 3 * PLANTED


def test_a_block_around_what_is_seen_anyway_is_the_same_piece(ran: Ran) -> None:
    """A program may mark its forward: once, with all that is in the block; so its evaluation, in the step after it."""
    recorded = ran["blocks around what is seen anyway"][0]

    assert [recorded.stages(step) for step in recorded.steps()] == [
        dict.fromkeys(PLAIN, 1),
        dict.fromkeys(PLAIN, 1) | {"evaluate": 1},
    ]
    found = totals(recorded)
    assert min(found[step]["forward"] for step in (0, 1)) >= 2 * PLANTED
    assert found[1]["evaluate"] >= PLANTED


def test_what_is_done_while_fetching_is_in_the_batch_s_own_step(ran: Ran) -> None:
    """Pinning, or a copy in the loader's collate function: not in the step before, which is not over yet."""
    recorded = ran["to the device while fetching"][0]
    found = totals(recorded)

    assert [recorded.stages(step) for step in recorded.steps()] == [PLAIN | {"to_device": 1}] * 2
    assert min(stages["to_device"] for stages in found.values()) >= PLANTED


def test_what_is_done_for_an_evaluation_is_in_the_step_that_follows(ran: Ran) -> None:
    """Though what the batch is for shows only at its forward."""
    recorded = ran["an evaluation of one batch"][0]
    with_copy = PLAIN | {"to_device": 1, "evaluate": 2}

    assert [recorded.stages(step) for step in recorded.steps()] == [PLAIN, PLAIN, with_copy, PLAIN]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The one after an evaluation is before the next step's first batch, with which that begins.
        ("a checkpoint after an evaluation", {2: 1}),
        ("a checkpoint in another thread", {}),
        ("a checkpoint that fails", {0: 2, 1: 2}),
        ("a distributed checkpoint", {0: 2, 1: 2}),
    ],
)
def test_a_checkpoint_is_a_stage_of_the_thread_that_trains(name: str, expected: dict[int, int], ran: Ran) -> None:
    """With all that it calls, also where it fails; what another thread writes is beside the step."""
    recorded = ran[name][0]
    found = {step: recorded.stages(step).get("checkpoint", 0) for step in recorded.steps()}

    assert {step: count for step, count in found.items() if count} == expected


@pytest.mark.parametrize(("name", "sizes"), [("told", [7, 7, 7]), ("marked", [10, 10, 4])])
def test_a_marked_step_knows_its_batch_size(name: str, sizes: list[int], ran: Ran) -> None:
    """As the program says, else that of the batch that it trains on, though that came before the step."""
    assert [step.a for step in ran[name][0].spans("step")] == sizes


# -- in several processes ---------------------------------------------------------------------------

RANKS = """
    import time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from otel_dltrace import phase

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def collate(batch):
        time.sleep(0.05 if rank == 1 else 0)
        return torch.utils.data.default_collate(batch)

    for x, y in DataLoader(TensorDataset(torch.ones(9, 4), torch.ones(9, 1)), batch_size=4, collate_fn=collate):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        with phase("reduce_metrics"):
            time.sleep(0.05 if rank == 0 else 0)
    dist.destroy_process_group()
"""


def test_every_rank_has_its_own_timings(tmp_path: Path) -> None:
    """At level step: what is slow on one rank is slow there, in every step, the last, partial one too."""
    ranks = run(tmp_path, RANKS, 2, 1)
    planted = ("dataloader_next", "reduce_metrics")
    slow = [{name for name in planted if min(s[name] for s in totals(rank).values()) >= PLANTED} for rank in ranks]

    assert [[step.a for step in rank.spans("step")] for rank in ranks] == [[4, 4, 1]] * 2
    assert slow == [{"reduce_metrics"}, {"dataloader_next"}]
    for rank in ranks:
        assert_adds_up(rank)


# -- the arithmetic ---------------------------------------------------------------------------------


PIECES = {
    "one after the other": (
        [("forward", 10, 20), ("backward", 20, 40), ("forward", 50, 60)],
        {"forward": (10, 60, 20, 2), "backward": (20, 40, 20, 1)},
    ),
    "inside": (
        [("to_device", 12, 15), ("from_device", 16, 17), ("forward", 10, 20)],
        {"to_device": (12, 15, 3, 1), "from_device": (16, 17, 1, 1), "forward": (10, 20, 6, 1)},
    ),
    "three deep": (
        [("to_device", 12, 13), ("prepare_batch", 11, 15), ("evaluate", 10, 20)],
        {"to_device": (12, 13, 1, 1), "prepare_batch": (11, 15, 3, 1), "evaluate": (10, 20, 6, 1)},
    ),
    "the same inside": (
        [("forward", 11, 12), ("forward", 13, 15), ("forward", 10, 20), ("forward", 30, 40)],
        {"forward": (10, 40, 20, 2)},
    ),
    "overlapping": (
        [("forward", 10, 20), ("backward", 15, 30)],
        {"forward": (10, 20, 10, 1), "backward": (15, 30, 10, 1)},
    ),
    "told late": (
        [("forward", 30, 40), ("dataloader_next", 10, 20), ("evaluate", 5, 50)],
        {"forward": (30, 40, 10, 1), "dataloader_next": (10, 20, 10, 1), "evaluate": (5, 50, 25, 1)},
    ),
    "told late, of what others have": (
        [("evaluate", 10, 30), ("forward", 30, 50), ("to_device", 12, 14), ("from_device", 28, 29)],
        {
            "evaluate": (10, 30, 20, 1),
            "forward": (30, 50, 20, 1),
            "to_device": (12, 14, 0, 1),
            "from_device": (28, 29, 0, 1),
        },
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_each_moment_counts_for_the_innermost_stage(name: str, steps: Steps, tmp_path: Path) -> None:
    """First start, last end, sum and count of every stage, for pieces however they lie."""
    pieces, expected = PIECES[name]
    steps.begin(1)
    for stage, start, end in pieces:
        steps.stage(stage, start, end)
    steps.end(100)
    (ring,) = tmp_path.glob("*.ring")

    assert {s.name: (s.start, s.end, s.size, s.a) for s in read_ring(ring).spans("stage")} == expected


def test_stages_have_numbers_of_their_own(steps: Steps, tmp_path: Path) -> None:
    """No two spans share one, in a step or from step to step."""
    for at in (10, 20, 30):
        steps.begin(at)
        for k, stage in enumerate(("dataloader_next", "forward", "backward")[: at // 10]):
            steps.stage(stage, at + k, at + k + 1)
    steps.end(40)
    (ring,) = tmp_path.glob("*.ring")
    spans = read_ring(ring)
    numbers = [s.number for s in spans.spans("stage") + spans.spans("step")]

    assert (len(numbers), len(set(numbers))) == (9, 9)


class Batches:
    """An iterator of batches, as far as a loop cares."""


def learn(loop: Loop, at: int) -> None:
    """Have *loop* see a batch trained on."""
    loop.forward_begins(at)
    loop.forward_ended(at, at + 1)
    loop.backward_ended(at + 1, at + 2)
    loop.optimizer_begins(loop, at + 2)
    loop.optimizer_ended(loop, at + 3)


def test_samples_are_those_of_the_batches_that_are_trained_on(steps: Steps, tmp_path: Path) -> None:
    """A loader that is a batch ahead gives each step its own samples, the last one too; evaluation gives none."""
    loop, batches = Loop(steps), Batches()

    loop.fetched(batches, 1, 2, 8)
    for at, size in ((10, 8), (20, 5)):
        loop.fetched(batches, at, at + 1, size)
        learn(loop, at + 2)
    loop.exhausted(batches)
    learn(loop, 30)
    loop.fetched(batches, 40, 41, 99, source="held out", training=False)
    loop.forward_begins(42, training=False)
    steps.end()
    (ring,) = tmp_path.glob("*.ring")

    assert [step.a for step in read_ring(ring).spans("step")] == [8, 8, 5]


def test_an_evaluation_takes_no_samples_of_batches_that_are_fetched_ahead(steps: Steps, tmp_path: Path) -> None:
    """A loader that is a batch ahead has fetched for the next step what it fetched before an evaluation."""
    loop, batches = Loop(steps), Batches()

    loop.fetched(batches, 1, 2, 8)
    for at in (10, 30):
        loop.fetched(batches, at, at + 1, 8)
        learn(loop, at + 2)
        held_out = Batches()
        for late in (at + 10, at + 13):
            loop.fetched(held_out, late, late + 1, 99, source=f"held out {at}")
            loop.forward_begins(late + 2, training=False)
        loop.exhausted(held_out)
    loop.exhausted(batches)
    learn(loop, 50)
    steps.end()
    (ring,) = tmp_path.glob("*.ring")

    assert [step.a for step in read_ring(ring).spans("step")] == [8, 8, 8]


FORKED_IN_A_CHECKPOINT = """
    import io, os
    import otel_dltrace
    otel_dltrace.instrument()
    import torch

    class Forks:
        def __reduce__(self):
            if not os.fork():
                torch.save({}, io.BytesIO())
                otel_dltrace.stop()
                os._exit(0)
            os.wait()
            return dict, ()

    with otel_dltrace.step():
        torch.save(Forks(), io.BytesIO())
    otel_dltrace.stop()
"""


def test_a_child_that_is_forked_in_a_stage_has_that_stage_itself(tmp_path: Path) -> None:
    """What runs in the parent does not run in it."""
    with a_place(tmp_path) as place:
        done = place.run(FORKED_IN_A_CHECKPOINT)
        assert done.returncode == 0, done.stderr
        place.wait_for_rings()
        checkpoints = [int(batch.lookup(lambda d: d.name == CHECKPOINT, bool).sum()) for batch in place.spans()]

    assert checkpoints == [1, 1]
