"""Functions of torch that somebody else patches as well, before us or after us."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("torch")

PROGRAM = """
import sys, tempfile, pathlib
sys.path.insert(0, {root!r})
import torch
from otel_dltrace.instrument import registry
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

Optimizer, seen = torch.optim.SGD, []

def patch(holder, name):
    before = getattr(holder, name)
    def theirs(*args, **kwargs):
        seen.append(name)
        return before(*args, **kwargs)
    setattr(holder, name, theirs)
    return theirs

def patch_all():
    schedulers = torch.optim.lr_scheduler.LRScheduler
    return [patch(torch.autograd, "backward"), patch(Optimizer, "step"), patch(schedulers, "step")]

def there():
    return [torch.autograd.backward, Optimizer.step, torch.optim.lr_scheduler.LRScheduler.step]

def train(steps):
    model = torch.nn.Linear(2, 1)
    optimizer = Optimizer(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen.clear()
    for _ in range(steps):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert seen == ["backward", "step", "step"] * steps, seen

def traced():
    stages = live.tracer.steps._stages
    return {{name: seen.count for name, seen in stages.items()}}

live.tracer = Tracer(Recorder(pathlib.Path(tempfile.mkdtemp(dir={folder!r})), 1 << 20))
EACH = dict.fromkeys(["forward", "backward", "optimizer", "step_lr_schedulers"], 1)
{program}
"""
BEFORE = """
theirs = patch_all()
Optimizer(torch.nn.Linear(1, 1).parameters())  # torch puts its own wrapper around a step at the first optimizer
theirs = there()
registry.instrument()
train(2)
assert traced() == EACH, traced()
registry.uninstrument()
assert there() == theirs
assert all(a is b for a, b in zip(there(), theirs))
train(1)
"""
AFTER = """
registry.instrument()
theirs = patch_all()
train(2)
assert traced() == EACH, traced()
hooked = there()
registry.uninstrument()
assert all(a is b for a, b in zip(there(), hooked))
upcoming = live.tracer.steps.upcoming
train(2)  # ours is still inside theirs
assert live.tracer.steps.upcoming == upcoming
live.tracer = None
train(2)
registry.instrument()
registry.uninstrument()
train(1)
"""


@pytest.mark.parametrize("program", [pytest.param(BEFORE, id="before us"), pytest.param(AFTER, id="after us")])
def test_who_else_patches_torch_keeps_their_patch(program: str, tmp_path: Path) -> None:
    """Their patch is called, ours records, and taking ours away leaves theirs in place and working."""
    text = PROGRAM.format(root=str(ROOT), folder=str(tmp_path), program=program)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
