"""Steps and stages of loops that people write in PyTorch."""

import textwrap
from pathlib import Path

import pytest
from torch_harness import run

from otel_dltrace.instrument._loop import Loop
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.steps import Steps

pytest.importorskip("torch")

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
other = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
loader = DataLoader(data, batch_size=4)
held_out = DataLoader(data, batch_size=8)

def learn(x, y, optimizer=optimizer):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

@torch.no_grad()
def evaluate():
    for x, y in held_out:
        model(x)
"""

PLAIN = {"dataloader_next": 1, "prepare_batch": 1, "forward": 1, "backward": 1, "optimizer": 1}
NO_LOADER = {"forward": 1, "backward": 1, "optimizer": 1}

LOOPS = {
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
        schedulers = torch.optim.lr_scheduler
        chained = schedulers.ChainedScheduler([schedulers.StepLR(optimizer, 2), schedulers.ExponentialLR(optimizer, 0.9)])
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
        # The other half is known for a root once an optimizer has stepped it.
        [PLAIN | {"forward": f, "backward": 2, "optimizer": 2} for f in (3, 4, 4, 4, 4, 4)],
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
        [NO_LOADER] + [NO_LOADER | {"forward": 2}] * 5,
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
        [{"forward": 2, "backward": 2, "optimizer": 1}] * 3,
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
        ready = queue.Queue(2)
        def load():
            for batch in loader:
                ready.put(batch)
            ready.put(None)
        threading.Thread(target=load).start()
        while (batch := ready.get()) is not None:
            learn(*batch)
        """,
        6,
    ),
    "steps marked by the program": (
        """
        from otel_dltrace.record.steps import step
        batches = iter(loader)
        for n in range(2):
            with step(n):
                for _ in range(3):
                    learn(*next(batches))
        """,
        [{name: 3 for name in PLAIN}] * 2,
    ),
    "no model": (
        """
        torch.ones(3, requires_grad=True).sum().backward()
        """,
        [],
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_steps_and_stages_are_those_of_the_loop(name: str, tmp_path: Path) -> None:
    """One step per optimizer cycle, with its stages and nothing else."""
    program, expected = LOOPS[name]
    (recorded,) = run(tmp_path, SETUP + textwrap.dedent(program)) if name != "no model" else [None]
    if recorded is None:
        run(tmp_path, SETUP + textwrap.dedent(program))
        return
    steps = recorded.steps()
    if isinstance(expected, int):
        assert steps == list(range(expected))
        return
    assert [recorded.stages(step) for step in steps] == expected
    assert steps == list(range(len(expected)))
