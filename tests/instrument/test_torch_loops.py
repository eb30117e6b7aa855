"""Steps and stages of loops that people write in PyTorch."""

from pathlib import Path

import pytest

from otel_dltrace.instrument._loop import Loop
from otel_dltrace.record.steps import Steps
from tests.support.torch_harness import read_ring, run, run_each
from tests.support.torch_loops import NO_LOADER, ONE_OPTIMIZER, PLAIN, SETUP, Loops, Ran, check, times

pytest.importorskip("torch")

UNSEEN = {"backward": 1, "optimizer": 1}
"""A cycle whose forward is not seen."""

LOOPS: Loops = {
    "plain": (
        """
        for x, y in loader:
            learn(x, y)
        """,
        [PLAIN] * 6,
    ),
    "two epochs and a scheduler": (
        """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            scheduler.step()
        """,
        ([PLAIN] * 5 + [PLAIN | {"step_lr_schedulers": 1}]) * 2,
    ),
    "schedulers that step one another": (
        """
        from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, StepLR
        chained = ChainedScheduler([StepLR(optimizer, 2), ExponentialLR(optimizer, 0.9)])
        for x, y in loader:
            learn(x, y)
            chained.step()
        """,
        [PLAIN | {"step_lr_schedulers": 1}] * 6,
    ),
    "accumulation": (
        """
        for i, (x, y) in enumerate(loader):
            nn.functional.mse_loss(model(x), y).backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        """,
        [{"dataloader_next": 3, "prepare_batch": 3, "forward": 3, "backward": 3, "optimizer": 1}] * 2,
    ),
    "two optimizers in turn": (
        """
        third = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader:
            learn(x, y)
            learn(x, y, third)
        """,
        [PLAIN | {"forward": 2, "backward": 2, "optimizer": 2}] * 6,
    ),
    "GAN": (
        """
        for x, y in loader:
            second.zero_grad()
            other(model(x).detach() * torch.ones(4)).mean().backward()
            second.step()
            optimizer.zero_grad()
            other(model(x) * torch.ones(4)).mean().backward()
            optimizer.step()
        """,
        [PLAIN | {"forward": 4, "backward": 2, "optimizer": 2}] * 6,
    ),
    "a forward with gradients behind the last batch": (
        """
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            model(torch.ones(4, 4))
        """,
        [PLAIN] * 6 + [PLAIN | {"forward": 2}] + [PLAIN] * 5,
    ),
    "a pass over the data, then no DataLoader": (
        """
        for x, y in loader:
            learn(x, y)
        for _ in range(3):
            learn(torch.ones(4, 4), torch.ones(4, 1))
        """,
        [PLAIN] * 6 + [NO_LOADER] * 3,
    ),
    "GAN without DataLoader": (
        """
        for _ in range(3):
            x = torch.ones(4, 4)
            other(model(x).detach() * torch.ones(4)).mean().backward()
            second.step()
            other(model(x) * torch.ones(4)).mean().backward()
            optimizer.step()
        """,
        # Contract 4: the first root forward after an optimizer step begins one.
        [NO_LOADER | {"forward": 2}] * 6,
    ),
    "two models in turn without DataLoader": (
        """
        for _ in range(3):
            learn(torch.ones(4, 4), torch.ones(4, 1))
            other(torch.ones(4, 4)).mean().backward()
            second.step()
        """,
        [NO_LOADER] * 6,
    ),
    "models one after the other without DataLoader": (
        """
        for _ in range(3):
            fold = nn.Linear(4, 1)
            its = torch.optim.SGD(fold.parameters(), lr=0.1)
            for _ in range(2):
                fold(torch.ones(4, 4)).mean().backward()
                its.step()
        """,
        [NO_LOADER] * 6,
    ),
    "scaler that meets one inf": (
        """
        scaler = torch.amp.GradScaler("cpu")
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss * (float("inf") if i == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        [PLAIN] * 6,
    ),
    "scaler that is off": (
        """
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for x, y in loader:
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        [PLAIN] * 6,
    ),
    "no DataLoader": (
        """
        for _ in range(5):
            learn(torch.ones(4, 4), torch.ones(4, 1))
        """,
        [NO_LOADER] * 5,
    ),
    "one batch again and again": (
        """
        x, y = next(iter(loader))
        for _ in range(3):
            learn(x, y)
        """,
        [PLAIN, NO_LOADER, NO_LOADER],
    ),
    "one optimizer that is left of two": (
        """
        del second
        for x, y in held_out:
            for _ in range(3):
                learn(x, y)
        """,
        # When the other one is freed is no matter: that is another moment on each rank.
        [PLAIN | times(3, NO_LOADER)] * 3,
    ),
    "two optimizers, one of which steps several times": (
        """
        for x, y in held_out:
            for _ in range(2):
                other(x).mean().backward()
                second.step()
            learn(x, y)
        """,
        [PLAIN | times(3, NO_LOADER)] * 3,
    ),
    "closure": (
        """
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2, max_eval=2)
        def closure():
            lbfgs.zero_grad()
            loss = model(torch.ones(4, 4)).sum()
            loss.backward()
            return loss
        for _ in range(3):
            lbfgs.step(closure)
        """,
        # What the closure does is not the optimizer's time: it goes on between and after them.
        [{"forward": 2, "backward": 2, "optimizer": 2}] * 3,
    ),
    "evaluation between, and after the last": (
        """
        evaluate()
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            evaluate()
        """,
        ([PLAIN | {"evaluate": 6}] + [PLAIN] * 5) * 2,
    ),
    "evaluation between, and after the last, that is marked and not seen": (
        """
        from otel_dltrace import phase
        for epoch in range(2):
            with phase("evaluate"):
                pass
            for x, y in loader:
                learn(x, y)
        with phase("evaluate"):
            pass
        """,
        ([PLAIN | {"evaluate": 1}] + [PLAIN] * 5) * 2,
    ),
    "scheduler that follows an evaluation": (
        """
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            evaluate()
            plateau.step(1.0)
        """,
        [PLAIN] * 6 + [PLAIN | {"evaluate": 6, "step_lr_schedulers": 1}] + [PLAIN] * 5,
    ),
    "evaluation in the middle of a step": (
        """
        for x, y in loader:
            with torch.no_grad():
                model(x)
            learn(x, y)
        """,
        [PLAIN | {"evaluate": 1}] * 6,
    ),
    "batches fetched ahead": (
        """
        batches = iter(loader)
        held = next(batches)
        while held is not None:
            ahead = next(batches, None)
            learn(*held)
            held = ahead
        """,
        [PLAIN | {"dataloader_next": 2}] + [PLAIN] * 4 + [NO_LOADER],
    ),
    "a batch loader in a thread": (
        """
        import queue, threading
        ready = queue.Queue()
        def load():
            for batch in loader:
                ready.put(batch)
            ready.put(None)
        loading = threading.Thread(target=load)
        loading.start()
        loading.join()
        while (batch := ready.get()) is not None:
            learn(*batch)
        """,
        # The order of fetches and steps is a race: they neither begin steps nor count.
        [NO_LOADER] * 6,
    ),
    "in another thread, a batch ahead, after a look at what there is": (
        """
        import threading
        def train():
            with torch.no_grad():
                model(next(iter(loader))[0])
            batches = iter(loader)
            held = next(batches)
            while held is not None:
                ahead = next(batches, None)
                learn(*held)
                held = ahead
        training = threading.Thread(target=train)
        training.start()
        training.join()
        """,
        [PLAIN | {"dataloader_next": 2, "evaluate": 2}] + [PLAIN] * 4 + [NO_LOADER],
    ),
    "an optimizer of parameters that other ranks may have": (
        """
        import tempfile, warnings
        from torch.distributed import autograd, rpc
        from torch.distributed.optim import DistributedOptimizer
        warnings.warn = lambda *_args, **_kwargs: None  # torch insists on telling of its own old ways
        folder = tempfile.TemporaryDirectory()
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder.name}/store")
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
        spread = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in model.parameters()], lr=0.1)
        for x, y in loader:
            with autograd.context() as context:
                autograd.backward(context, [nn.functional.mse_loss(model(x), y)])
                spread.step(context)
        rpc.shutdown()
        folder.cleanup()
        """,
        [PLAIN] * 6,
    ),
    "steps marked by the program": (
        """
        from otel_dltrace.record.blocks import step
        batches = iter(loader)
        for n in range(2):
            with step(n):
                for _ in range(3):
                    learn(*next(batches))
        """,
        [dict.fromkeys(PLAIN, 3)] * 2,
    ),
    "no model": (
        """
        torch.ones(3, requires_grad=True).sum().backward()
        """,
        [{"backward": 1}],
    ),
}

ALONE: Loops = {
    "one optimizer, each batch again and again": (
        """
        for x, y in held_out:
            for _ in range(3):
                learn(x, y)
        """,
        # What the first further forward is for shows at its backward.
        [
            PLAIN | {"forward": 2},
            {"backward": 1, "optimizer": 1},
            NO_LOADER,
            *[PLAIN, NO_LOADER, NO_LOADER] * 2,
        ],
    ),
    "one optimizer, and a look at what was learned": (
        """
        for x, y in loader:
            learn(x, y)
            loss_of(x, y)
        """,
        [PLAIN | {"forward": 2}] * 6,
    ),
    "one optimizer, each batch again and again, and no module called": (
        """
        for x, y in held_out:
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.linear(x, model[0].weight).mean().backward()
                optimizer.step()
        """,
        [UNSEEN | {"dataloader_next": 1}, UNSEEN, UNSEEN] * 3,
    ),
    "one optimizer, accumulation, and no module called": (
        """
        for i, (x, y) in enumerate(loader):
            for one in x.chunk(2):
                nn.functional.linear(one, model[0].weight).mean().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        """,
        [{"dataloader_next": 3, "backward": 6, "optimizer": 1}] * 2,
    ),
    "one optimizer, two backwards of one forward": (
        """
        for x, y in held_out:
            hidden = model[0](x)
            for loss in (hidden.mean(), (hidden * hidden).mean()):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                optimizer.step()
        """,
        [PLAIN | {"backward": 2, "optimizer": 2}] * 3,
    ),
    "one optimizer, the next batch fetched before the backward": (
        """
        batches = iter(loader)
        batch = next(batches)
        while batch is not None:
            loss = loss_of(*batch)
            batch = next(batches, None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
        [PLAIN | {"dataloader_next": 2}] + [NO_LOADER | {"dataloader_next": 1}] * 4 + [NO_LOADER],
    ),
    "one optimizer, an evaluation with the next batch in hand": (
        """
        batches = iter(held_out)
        batch = next(batches)
        while batch is not None:
            optimizer.zero_grad()
            loss_of(*batch).backward()
            batch = next(batches, None)
            optimizer.step()
            evaluate()
        """,
        [
            PLAIN | {"dataloader_next": 2},
            NO_LOADER | {"dataloader_next": 1, "evaluate": 6},
            NO_LOADER | {"evaluate": 6},
        ],
    ),
}
"""Loops of a process that has had one optimizer alone."""

NO_OPTIMIZER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(4, 1)
data = TensorDataset(torch.randn(24, 4))
loader = DataLoader(data, batch_size=4)
held_out = DataLoader(data, batch_size=8)

def parameters():
    return list(model.parameters())

@torch.no_grad()
def update():
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
        parameter.grad = None

@torch.no_grad()
def evaluate():
    for (x,) in held_out:
        model(x)
"""
BACKWARD = {"forward": 1, "backward": 1}
FETCHED = BACKWARD | {"dataloader_next": 1, "prepare_batch": 1}
BY_HAND: Loops = {
    "no optimizer": (
        """
        for epoch in range(2):
            for (x,) in loader:
                model(x).square().mean().backward()
                update()
            evaluate()
        """,
        [*[FETCHED] * 6, FETCHED | {"evaluate": 6}, *[FETCHED] * 5],
    ),
    "no optimizer, two backwards for each batch": (
        """
        for (x,) in loader:
            for loss in (model(x).mean(), model(x).square().mean()):
                loss.backward()
            update()
        """,
        [FETCHED | {"forward": 2, "backward": 2}] * 6,
    ),
    "no optimizer and no batches": (
        """
        for _ in range(3):
            model(data.tensors[0]).square().mean().backward()
            update()
        """,
        [BACKWARD] * 3,
    ),
    "no optimizer, and an accumulation once there is one": (
        """
        model(data.tensors[0]).mean().backward()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, (x,) in enumerate(loader):
            model(x).square().mean().backward()
            if i % 3 == 2:
                sgd.step()
        """,
        [BACKWARD, *[times(3, FETCHED) | {"optimizer": 1}] * 2],
    ),
}
"""Loops of a process that updates its parameters itself: with Keras on torch, for example."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What each loop recorded, and whether it computed the same untraced."""
    several = run_each(tmp_path_factory.mktemp("loops"), SETUP, {name: loop[0] for name, loop in LOOPS.items()})
    alone = {name: loop[0] for name, loop in ALONE.items()}
    by_hand = {name: loop[0] for name, loop in BY_HAND.items()}
    return (
        several
        | run_each(tmp_path_factory.mktemp("alone"), ONE_OPTIMIZER, alone)
        | run_each(tmp_path_factory.mktemp("by_hand"), NO_OPTIMIZER, by_hand)
    )


@pytest.mark.parametrize("name", LOOPS | ALONE | BY_HAND)
def test_steps_and_stages_are_those_of_the_loop(name: str, recorded: Ran) -> None:
    """One step per optimizer cycle, with its stages and nothing else; and what is learned stays the same."""
    check(recorded[name], (LOOPS | ALONE | BY_HAND)[name][1])


def test_an_optimizer_that_was_made_before_tracing_began_ends_the_cycles(tmp_path: Path) -> None:
    """No backward ends one there, though no optimizer was seen to be made."""
    program = """
        registry.uninstrument()
        model = torch.nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        registry.instrument()
        for i in range(6):
            model(torch.ones(2, 4)).mean().backward()
            if i % 3 == 2:
                sgd.step()
    """
    (recorded,) = run(tmp_path, program)
    assert [recorded.stages(step) for step in recorded.steps()] == [times(3, BACKWARD) | {"optimizer": 1}] * 2


def test_the_stages_of_a_step_add_up_to_no_more_than_it(recorded: Ran) -> None:
    """Whatever the loop, a moment is in one stage, and in the step that the stage is of."""
    for name, (spans, _) in recorded.items():
        for step in spans.spans("step"):
            stages = [stage for stage in spans.spans("stage") if stage.step == step.step]
            assert sum(stage.size for stage in stages) <= step.end - step.start, name
            assert all(step.start <= stage.start and stage.end <= step.end for stage in stages), name


def test_a_step_begins_where_the_evaluation_before_it_began(recorded: Ran) -> None:
    """An evaluation belongs to the step that follows, whose extent holds it; steps leave no gap."""
    spans, _ = recorded["evaluation between, and after the last"]
    steps = spans.spans("step")
    evaluations = [stage for stage in spans.spans("stage", "evaluate") if stage.step in (0, 6)]
    assert [(steps[e.step].start, steps[e.step].end > e.end) for e in evaluations] == [
        (e.start, True) for e in evaluations
    ]
    assert [before.end for before in steps[:-1]] == [after.start for after in steps[1:]]


@pytest.mark.parametrize("name", ["plain", "in another thread, a batch ahead, after a look at what there is"])
def test_a_step_knows_its_batch_size(name: str, recorded: Ran) -> None:
    """The step carries the number of samples of its last batch, the first one too."""
    assert [step.a for step in recorded[name][0].spans("step")] == [4] * 6


class Batches:
    """An iterator of batches, as far as a loop cares."""


def test_the_state_machine_needs_no_framework(steps: Steps, tmp_path: Path) -> None:
    """The same calls from any framework make the same steps, at the times given."""
    loop, batches = Loop(steps), Batches()
    for start in (100, 200):
        loop.fetched(batches, start, start + 10, 32)
        loop.forward_begins(start + 15)
        loop.forward_ended(start + 15, start + 40)
        loop.backward_ended(start + 40, start + 70)
        loop.optimizer_begins(loop, start + 70)
        loop.optimizer_ended(loop, start + 80)
    loop.exhausted(batches)
    steps.end()
    (ring,) = tmp_path.glob("*.ring")
    spans = read_ring(ring)

    assert [(s.step, s.start, s.end, s.a) for s in spans.spans("step")] == [(0, 100, 200, 32), (1, 200, 280, 32)]
    assert [(s.name, s.start, s.end) for s in spans.spans("stage") if s.step == 1] == [
        ("dataloader_next", 200, 210),
        ("prepare_batch", 210, 215),
        ("forward", 215, 240),
        ("backward", 240, 270),
        ("optimizer", 270, 280),
    ]


def test_an_optimizer_that_raises_does_not_end_the_cycle(steps: Steps) -> None:
    """A step that failed is tried again within the same step."""
    loop, batches, scaler = Loop(steps), Batches(), object()
    loop.fetched(batches, 1, 2)
    loop.optimizer_begins(scaler, 3)
    loop.optimizer_ended(scaler, 4, failed=True)
    loop.fetched(batches, 5, 6)

    assert steps.upcoming == 1
