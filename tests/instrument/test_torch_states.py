"""A model that a traced program saves or copies is the one that it would have been."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("torch")

PROGRAM = """
import copy, pickle, sys, tempfile, pathlib
sys.path.insert(0, {root!r})
import torch
from torch.nn import Linear, Sequential
from otel_dltrace.instrument import registry
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

def theirs(module, args):
    calls.append(module)

def hooks(module):
    tables = (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called)
    return [len(table) for table in tables]

live.tracer = Tracer(Recorder(pathlib.Path(tempfile.mkdtemp(dir={folder!r})), 1 << 20))
registry.instrument()
calls, model = [], Sequential(Linear(8, 1))
train(model)
own = hooks(model)
assert own == [1, 1, 1], own

def back(model):
    torch.save(model, "model.pt")
    with torch.serialization.safe_globals([Sequential, Linear]):
        return torch.load("model.pt")

for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), back(model), back(copy.deepcopy(model))):
    assert hooks(copied) == [0, 0, 0], hooks(copied)
    assert torch.equal(copied(torch.ones(1, 8)), model(torch.ones(1, 8)))
assert hooks(model) == own
model.handle = model.register_forward_pre_hook(theirs)
copied, shallow = copy.deepcopy(model), copy.copy(model)
assert list(copied._forward_pre_hooks.values()) == [theirs]
copied(torch.ones(1, 8))
assert calls == [copied]
copied.handle.remove()
assert hooks(copied) == [0, 0, 0]
assert shallow._forward_pre_hooks is model._forward_pre_hooks
model.handle.remove()
assert hooks(model) == hooks(shallow) == own

# A model from a file has hooks under numbers of the process that saved it.
loaded = Sequential(Linear(8, 1))
first = torch.utils.hooks.RemovableHandle.next_id
loaded._forward_pre_hooks.update(dict.fromkeys(range(first, first + 4), theirs))
train(loaded)
assert hooks(loaded) == [5, 1, 1], hooks(loaded)
number = next(iter(model._forward_hooks))
loaded = Linear(8, 1)
for table, value in ((loaded._forward_hooks, theirs), (loaded._forward_hooks_always_called, True)):
    table[number] = value
copied = copy.deepcopy(loaded)
assert (dict(copied._forward_hooks), dict(copied._forward_hooks_always_called)) == (dict([(number, theirs)]),
    dict([(number, True)]))

class Unmade(torch.nn.Module):
    def __init__(self):
        pass
pickle.dumps(Unmade())

recurrent = torch.nn.LSTM(8, 1)
optimizer = torch.optim.SGD(recurrent.parameters(), lr=0.1)
recurrent(torch.ones(4, 8))[0].sum().backward()
optimizer.step()
compiled = torch.compile(Sequential(Linear(8, 1)), backend="eager")
train(compiled)
assert hooks(recurrent) == hooks(compiled) == own, (hooks(recurrent), hooks(compiled))
assert hooks(copy.deepcopy(recurrent)) == hooks(copy.deepcopy(compiled)) == [0, 0, 0]

import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrapped = torch.nn.parallel.DistributedDataParallel(Sequential(Linear(8, 1)))
train(wrapped)
assert hooks(wrapped) == hooks(wrapped.module) == own
copied = pickle.loads(pickle.dumps(wrapped))
assert hooks(copied) == hooks(copied.module) == [0, 0, 0]
dist.destroy_process_group()
stages = live.tracer.steps._stages
assert stages["forward"].count, stages
registry.uninstrument()
assert hooks(model) == hooks(wrapped) == [0, 0, 0]
"""
ELSEWHERE = "import torch; torch.jit.script(torch.load('model.pt', weights_only=False))"


def test_what_is_saved_or_copied_has_no_hook_of_ours(tmp_path: Path) -> None:
    """It can be read back without trust, scripted by a process that is not traced, and keeps the program's hooks."""
    for text in (PROGRAM.format(root=str(ROOT), folder=str(tmp_path)), ELSEWHERE):
        command = [sys.executable, "-W", "ignore", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert (done.returncode, done.stderr) == (0, "")
