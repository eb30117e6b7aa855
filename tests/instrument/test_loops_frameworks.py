"""Hugging Face Accelerate and Lightning: their loops are understood without any code of ours for them."""

import importlib.util
from pathlib import Path

import pytest

from tests.support.torch_harness import run, run_each
from tests.support.torch_loops import PLAIN as BARE
from tests.support.torch_loops import SETUP, Loops, Ran, check, times

# Found and not imported: that takes seconds, and happens once, in the processes below.
if not all(importlib.util.find_spec(name) for name in ("torch", "accelerate", "lightning")):
    pytest.skip("needs torch, accelerate and lightning", allow_module_level=True)

FRAMEWORKS = """
import logging, warnings
import accelerate, lightning
logging.disable(logging.WARNING)  # Lightning tells that it runs on a CPU, and what else one may install
warnings.simplefilter("ignore")  # and that this loader could have workers
"""
ACCELERATE = """
from accelerate import Accelerator

def accelerate_epochs(**options):
    accelerator = Accelerator(cpu=True, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    prepared, sgd, batches, validation, plan = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    for epoch in range(2):
        prepared.train()
        for x, y in batches:
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(x, y, prepared))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                sgd.step()
                plan.step()
                sgd.zero_grad()
        prepared.eval()
        for x, y in validation:
            with torch.no_grad():
                out = prepared(x)
            accelerator.gather_for_metrics((out, y))
"""
LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch, number):
        x, y = batch
        return loss_of(x, y, self)

    def validation_step(self, batch, number):
        x, y = batch
        self.log("loss", loss_of(x, y, self), sync_dist=True)

    def configure_optimizers(self):
        adam = torch.optim.Adam(self.parameters(), lr=0.1)
        return [adam], [torch.optim.lr_scheduler.StepLR(adam, 1)]

class Gan(Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Linear(1, 1)
        self.automatic_optimization = False

    def training_step(self, batch, number):
        x, _ = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.critic(self.inner(x)).mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.critic, self.inner)]

def fit(module, *batches, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", num_sanity_val_steps=1, **quiet, **options)
    trainer.fit(module, *batches)
"""

PLAIN = BARE | {"to_device": 1}
SCHEDULED = PLAIN | {"step_lr_schedulers": 1}
EVALUATED = PLAIN | {"evaluate": 6, "to_device": 4}
WITHOUT_BATCH = {name: 1 for name in SCHEDULED if name not in ("dataloader_next", "prepare_batch", "to_device")}
LOOPS: Loops = {
    "Accelerate": (
        "accelerate_epochs()",
        # It fetches a batch ahead, to know the last one.
        [SCHEDULED | {"dataloader_next": 2, "to_device": 2}]
        + [SCHEDULED] * 4
        + [WITHOUT_BATCH]
        + [SCHEDULED | {"dataloader_next": 2, "evaluate": 6, "to_device": 5, "reduce_metrics": 3}]
        + [SCHEDULED] * 4
        + [WITHOUT_BATCH],
    ),
    "Accelerate that accumulates": (
        "accelerate_epochs(gradient_accumulation_steps=3)",
        [
            times(3)
            | {"dataloader_next": fetches, "prepare_batch": min(fetches, 3), "to_device": fetches, "optimizer": 1}
            | {"step_lr_schedulers": 1}
            | more
            for more in ({}, {"evaluate": 6, "to_device": 7, "reduce_metrics": 3})
            for fetches, more in ((4, more), (2, {}))
        ],
    ),
    "Lightning": (
        "fit(Module(), loader, held_out, max_epochs=2)",
        [PLAIN | {"evaluate": 2, "to_device": 2}] + [PLAIN] * 4 + [SCHEDULED] + [EVALUATED] + [PLAIN] * 4 + [SCHEDULED],
    ),
    "Lightning that accumulates": (
        "fit(Module(), loader, held_out, max_epochs=1, accumulate_grad_batches=3)",
        [
            times(3, PLAIN) | {"optimizer": 1, "evaluate": 2, "to_device": 4},
            times(3, PLAIN) | {"optimizer": 1, "step_lr_schedulers": 1},
        ],
    ),
    "Lightning in bfloat16, clipped": (
        "fit(Module(), loader, max_epochs=1, precision='bf16-mixed', gradient_clip_val=0.5)",
        [PLAIN] * 5 + [SCHEDULED],
    ),
    "Lightning with several optimizers": (
        "fit(Gan(), loader, max_epochs=1)",
        [PLAIN | {"forward": 4, "backward": 2, "optimizer": 2}] * 6,
    ),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What each loop recorded, and whether it computed the same untraced."""
    programs = {name: loop[0] for name, loop in LOOPS.items()}
    return run_each(tmp_path_factory.mktemp("frameworks"), SETUP + ACCELERATE + LIGHTNING, programs, FRAMEWORKS)


@pytest.mark.parametrize("name", LOOPS)
def test_steps_and_stages_are_those_of_the_framework_s_loop(name: str, recorded: Ran) -> None:
    """One step per optimizer cycle, also where a framework fetches ahead, accumulates or steps with a closure."""
    check(recorded[name], LOOPS[name][1])


@pytest.mark.parametrize("name", ["Accelerate", "Lightning"])
def test_a_step_knows_the_framework_s_epoch(name: str, recorded: Ran) -> None:
    """Also of a framework that fetches no more than a loader has, and so never meets its end."""
    assert [step.b for step in recorded[name][0].spans("step")] == [0] * 6 + [1] * 6


@pytest.mark.parametrize("name", ["Accelerate", "Lightning"])
def test_the_stages_of_a_step_follow_one_another(name: str, recorded: Ran) -> None:
    """Lightning runs forward and backward inside the optimizer's step; its time is what is left of that."""
    spans, _ = recorded[name]
    for step in spans.steps():
        stages = {s.name: s for s in spans.spans("stage") if s.step == step}
        forward, backward, optimizer = (stages[name] for name in ("forward", "backward", "optimizer"))
        assert forward.end <= backward.start
        assert backward.end <= optimizer.start


RANKS = """
import hashlib
def learned():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

start = [p.detach().clone() for p in model.parameters()]
for traced in (True, False):
    if not traced:
        stop()
    with torch.no_grad():
        for p, before in zip(model.parameters(), start):
            p.copy_(before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerate_epochs()
    fit(Module(), loader, held_out, max_epochs=1, devices=2, strategy="ddp")
    say(learned=learned())
torch.distributed.barrier()
os._exit(0)  # traced or not, torch's threads abort one process in ten that ends after this
"""


def test_two_ranks_agree_on_the_steps_of_a_framework(tmp_path: Path) -> None:
    """Accelerate's and Lightning's DDP on gloo: the same steps on both ranks, and the same results untraced."""
    ranks = run(tmp_path, FRAMEWORKS + SETUP + ACCELERATE + LIGHTNING + RANKS, ranks=2)
    per_rank = [[rank.stages(step) for step in rank.steps()] for rank in ranks]
    assert per_rank[0] == per_rank[1]
    three = SCHEDULED | {"step_lr_schedulers": 2}  # Accelerate steps the scheduler once for each rank
    ahead = {name: count for name, count in three.items() if name in WITHOUT_BATCH}
    accelerated = [three | {"dataloader_next": 2, "to_device": 2}, three, ahead]
    assert per_rank[0] == [
        *accelerated,
        *[accelerated[0] | {"evaluate": 4, "to_device": 4, "reduce_metrics": 2}, three, ahead],
        *[EVALUATED | {"reduce_metrics": 7}, PLAIN, SCHEDULED],  # a logged value, and its average
    ]
    for rank in ranks:
        traced, untraced = (said["learned"] for said in rank.said)
        assert traced == untraced


ADVERSARIES = """
class Adversaries(Gan):
    def training_step(self, batch, number):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.critic(self(batch[0])).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

fit(Adversaries(), loader, max_epochs=1, devices=2, strategy="ddp_find_unused_parameters_true")
stop()
torch.distributed.barrier()
os._exit(0)  # as above
"""


def test_a_step_that_runs_inside_its_model_s_forward_has_its_stages_and_buckets(tmp_path: Path) -> None:
    """With manual optimization Lightning's DDP has the whole step in its forward, and only one half is not frozen."""
    for rank in run(tmp_path, FRAMEWORKS + SETUP + LIGHTNING + ADVERSARIES, ranks=2):
        assert [rank.stages(step) for step in rank.steps()] == [PLAIN | {"backward": 2, "optimizer": 2}] * 3
        for step in rank.spans("step"):
            stages = {s.name: s for s in rank.spans("stage") if s.step == step.step}
            assert stages["forward"].start < stages["backward"].start
            assert stages["optimizer"].end < stages["forward"].end
            assert sum(s.size for s in stages.values()) <= step.end - step.start
            buckets = [s for s in rank.spans("collective", "all_reduce") if s.step == step.step]
            assert [s.descriptor.tensor for s in buckets] == ["bucket 0"] * 2
