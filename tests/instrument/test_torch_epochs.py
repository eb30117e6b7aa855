"""Which pass over the data each step is in, as DataLoaders, samplers and the program tell it."""

from pathlib import Path

import pytest

from tests.support.torch_harness import run_each
from tests.support.torch_loops import SETUP

pytest.importorskip("torch")

SIX = [0] * 6 + [1] * 6 + [2] * 6
EPOCHS = {
    "plain, and an evaluation after each": (
        """
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            evaluate()
        """,
        SIX,
    ),
    "a forward behind each, with gradients": (
        """
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            model(torch.ones(4, 4))
        """,
        SIX,
    ),
    "a loader of its own for each": (
        """
        for epoch in range(3):
            for x, y in DataLoader(data, batch_size=4):
                learn(x, y)
        """,
        SIX,
    ),
    "an evaluation first": (
        """
        evaluate()
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            evaluate()
        """,
        SIX,
    ),
    "one batch ahead": (
        """
        for epoch in range(3):
            batches = iter(loader)
            following = next(batches)
            while following is not None:
                batch, following = following, next(batches, None)
                learn(*batch)
        """,
        SIX,
    ),
    "a shorter loader beside it": (
        """
        short = iter(held_out)
        for epoch in range(3):
            for x, y in loader:
                try:
                    next(short)
                except StopIteration:
                    short = iter(held_out)
                    next(short)
                learn(x, y)
        """,
        SIX,
    ),
    "never to the end": (
        """
        for number in range(4):
            learn(*next(iter(loader)))
        """,
        [0] * 4,
    ),
    "the number that a sampler is told": (
        """
        from torch.utils.data.distributed import DistributedSampler
        sampler = DistributedSampler(data, 1, 0)
        for epoch in (7, 8):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, batch_size=4, sampler=sampler):
                learn(x, y)
        """,
        [7] * 6 + [8] * 6,
    ),
    "another number that the sampler of an evaluation is told": (
        """
        from torch.utils.data.distributed import DistributedSampler
        samplers = [DistributedSampler(data, 1, 0) for _ in range(2)]
        batches, held = (DataLoader(data, batch_size=size, sampler=s) for size, s in zip((4, 12), samplers))
        for epoch in (7, 8):
            samplers[0].set_epoch(epoch)
            for number, (x, y) in enumerate(batches):
                learn(x, y)
                samplers[1].set_epoch(number)
                with torch.no_grad():
                    for x, y in held:
                        model(x)
        """,
        [7] * 6 + [8] * 6,
    ),
    "steps that the program marks": (
        """
        import otel_dltrace
        for epoch in range(2):
            for x, y in loader:
                with otel_dltrace.step():
                    learn(x, y)
        """,
        [0] * 6 + [1] * 6,
    ),
    "steps whose epoch the program says": (
        """
        import otel_dltrace
        batches = iter(DataLoader(data, batch_size=12))
        for epoch in (3, 3, 4):
            with otel_dltrace.step(epoch=epoch):
                batch = next(batches, None)
                if batch is None:
                    batches = iter(loader)
                    batch = next(batches)
                learn(*batch)
        """,
        [3, 3, 4],
    ),
    "no loader": (
        """
        for number in range(3):
            learn(torch.ones(4, 4), torch.ones(4, 1))
        """,
        [-1] * 3,
    ),
}


def test_a_step_knows_its_epoch(tmp_path: Path) -> None:
    """It counts passes over the data that begins steps, unless the program says its own number; -1: nobody tells."""
    ran = run_each(tmp_path, SETUP, {name: program for name, (program, _) in EPOCHS.items()})

    assert {name: [step.b for step in spans.spans("step")] for name, (spans, _) in ran.items()} == {
        name: epochs for name, (_, epochs) in EPOCHS.items()
    }
    assert all(same for _, same in ran.values())
