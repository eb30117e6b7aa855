"""What the tests of loops share: a model, its data, what a plain step looks like."""

from tests.support.torch_harness import Recorded, Span

Loops = dict[str, tuple[str, list[dict[str, int]]]]
"""By name: a program, and how often each stage comes in each of its steps."""
Ran = dict[str, tuple[Recorded, bool]]

ONE_OPTIMIZER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
other = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
loader = DataLoader(data, batch_size=4)
held_out = DataLoader(data, batch_size=8)

def loss_of(x, y, model=model):
    return nn.functional.mse_loss(model(x), y)

def learn(x, y, optimizer=optimizer):
    optimizer.zero_grad()
    loss_of(x, y).backward()
    optimizer.step()

def parameters():
    return [*model.parameters(), *other.parameters()]

@torch.no_grad()
def evaluate():
    for x, y in held_out:
        model(x)
"""
SETUP = f"""{ONE_OPTIMIZER}
second = torch.optim.SGD(other.parameters(), lr=0.1)
"""

NO_LOADER = {"forward": 1, "backward": 1, "optimizer": 1}
PLAIN = NO_LOADER | {"dataloader_next": 1, "prepare_batch": 1}
EVALUATED = PLAIN | {"evaluate": 6}
"""A step that follows an evaluation of three batches."""


def times(count: int, stages: dict[str, int] = PLAIN) -> dict[str, int]:
    """Return *stages*, each coming *count* times."""
    return dict.fromkeys(stages, count)


def check(ran: tuple[Recorded, bool], expected: list[dict[str, int]]) -> None:
    """Compare the steps and stages with the *expected* ones, and what was learned with what is learned untraced."""
    spans, same = ran
    steps = spans.steps()
    assert steps == list(range(len(expected)))
    assert [spans.stages(step) for step in steps] == expected
    assert same


PLANTED = 50_000_000


def inside(recorded: Recorded) -> dict[int, list[Span]]:
    """Return the stages of each step; without those that were over before it, as a fetch before a marked step is."""
    begins = {step.step: step.start for step in recorded.spans("step")}
    found: dict[int, list[Span]] = {step: [] for step in begins}
    for stage in recorded.spans("stage"):
        if stage.step in begins and stage.end > begins[stage.step]:
            found[stage.step].append(stage)
    return found


def totals(recorded: Recorded) -> dict[int, dict[str, int]]:
    """Return the ns of each stage of each step."""
    return {step: {stage.name: stage.size for stage in stages} for step, stages in inside(recorded).items()}


def assert_adds_up(recorded: Recorded) -> None:
    """Check that the stages of each step are within it, one after the other."""
    for step in recorded.spans("step"):
        stages = inside(recorded)[step.step]
        assert all(step.start <= stage.start <= stage.end <= step.end for stage in stages), stages
        assert all(0 <= stage.size <= stage.end - stage.start for stage in stages), stages
        assert 0 < sum(stage.size for stage in stages) <= step.end - step.start, stages
