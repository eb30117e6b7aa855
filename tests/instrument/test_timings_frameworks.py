"""Transfers, shared metrics and checkpoints of Accelerate and Lightning are stages; and all is put back afterwards."""

import importlib.util
import tempfile
from pathlib import Path

import pytest

from tests.support.processes import a_place
from tests.support.torch_harness import run_each
from tests.support.torch_loops import PLANTED, SETUP, Ran, assert_adds_up, totals

if not all(importlib.util.find_spec(name) for name in ("torch", "accelerate", "lightning", "pytorch_lightning")):
    pytest.skip("needs torch, accelerate and lightning", allow_module_level=True)

FIRST = """
import logging, warnings
import accelerate, lightning
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
"""
SLOW = """
import tempfile, time
import lightning
from lightning.pytorch.loggers import CSVLogger

class SlowBatch(dict):
    def to(self, device, **how):
        time.sleep(0.05)
        return self

def collate(batch):
    x, y = torch.utils.data.default_collate(batch)
    return SlowBatch(x=x, y=y)

batches = DataLoader(data, batch_size=12, collate_fn=collate)
folder = tempfile.mkdtemp(dir="/dev/shm")
"""
PROGRAMS = {
    "Accelerate": """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        prepared, sgd, loading = accelerator.prepare(model, optimizer, batches)
        for batch in loading:
            loss = loss_of(batch["x"], batch["y"], prepared)
            accelerator.backward(loss)
            sgd.step()
            accelerator.gather_for_metrics(loss.detach())
            accelerator.save_state(folder)
    """,
    "Lightning": """
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner = model

            def training_step(self, batch, number):
                loss = loss_of(batch["x"], batch["y"], self.inner)
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        options = dict(default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False)
        logger = CSVLogger(folder)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=logger, log_every_n_steps=1, **options)
        trainer.fit(Module(), batches)
    """,
    "Fabric": """
        fabric = lightning.Fabric(accelerator="cpu")
        inner, sgd = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(batches):
            loss = loss_of(batch["x"], batch["y"], inner)
            fabric.backward(loss)
            sgd.step()
            fabric.all_reduce(loss)
            fabric.save(folder + "/saved", {"model": inner})
    """,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What each program recorded, and whether it computed the same untraced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # what the programs save
        setup = SETUP + SLOW.replace("/dev/shm", folder)
        return run_each(tmp_path_factory.mktemp("frameworks"), setup, PROGRAMS, FIRST)


SHARED = {"reduce_metrics": 1, "checkpoint": 1}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # A batch ahead, and the last step has none of its own.
        (
            "Accelerate",
            [{"to_device": 2, "reduce_metrics": 1, "checkpoint": 1}, {"reduce_metrics": 1, "checkpoint": 1}],
        ),
        ("Lightning", [{"to_device": 1, "from_device": 1}, {"to_device": 1, "from_device": 1, "checkpoint": 1}]),
        ("Fabric", [SHARED | {"to_device": 1}] * 2),
    ],
)
def test_a_framework_s_own_calls_are_stages(name: str, steps: list[dict[str, int]], ran: Ran) -> None:
    """Each call once, with all that it calls; a slow copy is found in `to_device` and in nothing else."""
    recorded, same = ran[name]
    names = {name for step in steps for name in step}
    found = [{n: c for n, c in recorded.stages(step).items() if n in names} for step in recorded.steps()]

    assert found == steps
    assert same
    assert_adds_up(recorded)
    for step, stages in totals(recorded).items():
        assert stages.get("to_device", 0) >= PLANTED * steps[step].get("to_device", 0)


RESTORED = """
    import sys, types, warnings
    warnings.simplefilter("ignore")
    order = sys.argv[1]
    import otel_dltrace
    if order == "before":
        otel_dltrace.instrument()
    import accelerate, lightning, pytorch_lightning, torch.distributed.checkpoint, torchmetrics
    from otel_dltrace.instrument import _sites

    PACKAGES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")

    def everything():
        found = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PACKAGES and module is not None:
                for key, value in list(vars(module).items()):
                    found[name, key] = value
                    if isinstance(value, type):
                        found.update({(name, key, member): it for member, it in vars(value).items()})
        return found

    def is_ours(value):
        is_function = isinstance(value, types.FunctionType)
        return is_function and value.__code__.co_filename.startswith(_sites.__file__.rpartition("/")[0])

    before = everything()
    if order == "after":
        otel_dltrace.instrument()
    wrapped = {key for key, value in everything().items() if is_ours(value)}
    for path in ("accelerate.data_loader send_to_device", "torch save", "torch.distributed.checkpoint async_save"):
        assert tuple(path.split()) in wrapped, path
    for stem in ("lightning.pytorch", "pytorch_lightning"):
        assert (f"{stem}.strategies.strategy", "Strategy", "batch_to_device") in wrapped, stem
    otel_dltrace.uninstrument()
    after = everything()
    assert [key for key, value in after.items() if is_ours(value)] == []
    if order == "after":
        changed = [key for key, value in before.items() if callable(value) and after.get(key) is not value]
        assert not changed, changed
    otel_dltrace.stop()
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_every_function_is_put_back(order: str, tmp_path: Path) -> None:
    """The same objects, wherever a framework has imported them by name; instrumented before its import or after."""
    with a_place(tmp_path) as place:
        done = place.run(RESTORED, order)
        assert done.returncode == 0, done.stderr


COMPILED = """
    import warnings
    warnings.simplefilter("ignore")
    import otel_dltrace
    otel_dltrace.instrument()
    import torch
    from accelerate.utils import send_to_device

    @torch.compile(backend="eager", fullgraph=True)
    def moved(x):
        return send_to_device({"x": x}, torch.device("cpu"))["x"] + 1

    with otel_dltrace.step():
        assert moved(torch.ones(2)).tolist() == [2.0, 2.0]
        send_to_device(torch.ones(2), "cpu")
    otel_dltrace.stop()
"""


def test_a_transfer_inside_a_graph_leaves_the_graph_whole(tmp_path: Path) -> None:
    """``fullgraph=True`` would raise; outside of it the call is a stage."""
    with a_place(tmp_path) as place:
        done = place.run(COMPILED)
        assert done.returncode == 0, done.stderr
        place.wait_for_rings()
        (batch,) = place.spans()

        assert batch["a"][batch.lookup(lambda d: d.name == "to_device", bool)].tolist() == [1]
