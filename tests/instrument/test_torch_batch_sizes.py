"""How many samples a step is said to train on, where batches are left out, joined or fetched for nothing."""

from collections import deque
from collections.abc import Hashable

import pytest

from otel_dltrace.instrument._batch_sizes import take
from tests.support.torch_harness import run_each
from tests.support.torch_loops import SETUP, Ran

pytest.importorskip("torch")

UNEVEN = """
uneven = DataLoader(TensorDataset(torch.randn(14, 4), torch.randn(14, 1)), batch_size=4)
"""
EPOCH = [4, 4, 4, 2]
LOOPS = {
    "a peek at the first batch": (
        """
        next(iter(uneven))
        for epoch in range(2):
            for x, y in uneven:
                learn(x, y)
        """,
        EPOCH * 2,
    ),
    "a peek that a model sees without gradients": (
        """
        with torch.no_grad():
            model(next(iter(uneven))[0])
        for epoch in range(2):
            for x, y in uneven:
                learn(x, y)
        """,
        EPOCH * 2,
    ),
    "a batch that is skipped": (
        """
        for epoch in range(2):
            for i, (x, y) in enumerate(uneven):
                if i != 1:
                    learn(x, y)
        """,
        [4, 4, 2] * 2,
    ),
    "a batch that fails before it is used": (
        """
        for epoch in range(2):
            for i, (x, y) in enumerate(uneven):
                try:
                    learn(x if i else x.reshape(-1, 5), y)
                except RuntimeError:
                    pass
        """,
        [4, 4, 2] * 2,
    ),
    "a loop that is left, and an evaluation": (
        """
        for epoch in range(3):
            for i, (x, y) in enumerate(uneven):
                if epoch < 2 and i == 2:
                    break
                learn(x, y)
            if epoch < 2:
                evaluate()
        """,
        [4, 4] * 2 + EPOCH,
    ),
    "two loaders, joined": (
        """
        for epoch in range(2):
            for (x, y), (u, v) in zip(uneven, DataLoader(data, batch_size=3)):
                learn(torch.cat([x, u]), torch.cat([y, v]))
        """,
        [7, 7, 7, 5] * 2,
    ),
    "two loaders, one after the other": (
        """
        for (x, y), (u, v) in zip(uneven, DataLoader(data, batch_size=3)):
            optimizer.zero_grad()
            (loss_of(x, y) + loss_of(u, v)).backward()
            optimizer.step()
        """,
        [7, 7, 7, 5],
    ),
    "a batch ahead, over the ends of epochs": (
        """
        def again():
            while True:
                yield from uneven
        def ahead(batches):
            before = next(batches)
            for batch in batches:
                yield before
                before = batch
        for i, (x, y) in zip(range(8), ahead(again())):
            learn(x, y)
        """,
        EPOCH * 2,
    ),
    "a batch ahead, and an optimizer that steps for each of its groups alone": (
        """
        def ahead(batches):
            before = next(batches)
            for batch in batches:
                yield before
                before = batch
            yield before
        groups = [{**optimizer.param_groups[0], "params": [*one.parameters()]} for one in (model[0], model[2])]
        for epoch in range(2):
            for x, y in ahead(iter(uneven)):
                model.zero_grad()
                loss_of(x, y).backward()
                for group in groups:
                    optimizer.param_groups = [group]
                    optimizer.step()
        """,
        EPOCH * 2,
    ),
    "a model of which a graph is made between the batches": (
        """
        import warnings
        for (x, y), (u, v) in zip(uneven, DataLoader(data, batch_size=3)):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                torch.jit.trace(model, x)
            assert not [w for w in told if w.category is torch.jit.TracerWarning]
            learn(torch.cat([x, u]), torch.cat([y, v]))
        """,
        [7, 7, 7, 5],
    ),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What each loop recorded, and whether it computed the same untraced."""
    programs = {name: loop[0] for name, loop in LOOPS.items()}
    return run_each(tmp_path_factory.mktemp("sizes"), SETUP + UNEVEN, programs)


@pytest.mark.parametrize("name", LOOPS)
def test_a_step_knows_how_many_samples_it_trains_on(name: str, recorded: Ran) -> None:
    """Each step has the samples of its own batches: what is left out shifts none of those that follow."""
    spans, same = recorded[name]
    assert [step.a for step in spans.spans("step")] == LOOPS[name][1]
    assert same


class Shaped:
    """What a forward is given, as far as its size matters; without *rows* it says nothing of that."""

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        """Return its shape, if it has one."""
        if not self.rows:
            raise RuntimeError("no shape")
        return self.rows, 4


@pytest.mark.parametrize(
    ("waiting", "given", "size", "left"),
    [
        pytest.param([("a", 4), ("a", 4)], 4, 4, 1, id="the oldest"),
        pytest.param([("a", 4), ("a", 2)], 2, 2, 0, id="one behind another"),
        pytest.param([("a", 4), ("b", 3)], 7, 7, 0, id="joined"),
        pytest.param([("a", 4), ("a", 4), ("b", 3)], 7, 7, 0, id="joined behind another"),
        pytest.param([("a", 4), ("a", 4)], 8, 4, 1, id="a batch ahead, seen twice"),
        pytest.param([("a", 4), ("a", 3)], 1, 4, 1, id="a part"),
        pytest.param([("a", 4), ("a", 3)], 0, 4, 1, id="of no shape"),
    ],
)
def test_of_several_batches_the_one_is_taken_that_is_given(
    waiting: list[tuple[Hashable, int]], given: int, size: int, left: int
) -> None:
    """The oldest one, unless what is given tells that it was left out."""
    batches = deque(waiting)
    assert (take(batches, (Shaped(given),)), len(batches)) == (size, left)
