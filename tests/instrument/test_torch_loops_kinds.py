"""Steps and stages where evaluation, optimizers, data and interruptions come as people write them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import but_for_rings
from tests.support.torch_harness import run_each
from tests.support.torch_loops import EVALUATED, NO_LOADER, PLAIN, SETUP, Loops, Ran, check

pytest.importorskip("torch")

EVALUATIONS: Loops = {
    "batches fetched with gradients on": (
        """
        for epoch in range(2):
            model.train()
            for x, y in loader:
                learn(x, y)
            model.eval()
            for x, y in held_out:
                with torch.no_grad():
                    model(x)
        """,
        [PLAIN] * 6 + [EVALUATED] + [PLAIN] * 5,
    ),
    "the same in training mode": (
        """
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            for x, y in held_out:
                with torch.no_grad():
                    model(x)
        """,
        [PLAIN] * 6 + [EVALUATED] + [PLAIN] * 5,
    ),
    "a sampler in the place of one that is gone": (
        """
        class Eights:
            def __iter__(self):
                return iter([range(8), range(8, 16), range(16, 24)])
        sampler = Eights()
        for x, y in DataLoader(data, batch_sampler=sampler):
            learn(x, y)
        place = id(sampler)
        del sampler
        samplers = [Eights() for _ in range(100)]
        sampler = next((one for one in samplers if id(one) == place), samplers[0])  # not on every Python
        for x, y in DataLoader(data, batch_sampler=sampler):
            with torch.no_grad():
                model(x)
        for x, y in loader:
            learn(x, y)
        """,
        [PLAIN] * 3 + [EVALUATED] + [PLAIN] * 5,
    ),
    "on the data that was trained on": (
        """
        for epoch in range(2):
            model.train()
            for x, y in loader:
                learn(x, y)
            model.eval()
            for x, y in loader:
                with torch.inference_mode():
                    model(x)
        """,
        [PLAIN] * 6 + [PLAIN | {"evaluate": 12}] + [PLAIN] * 5,
    ),
    "inference mode": (
        """
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            with torch.inference_mode():
                for x, y in held_out:
                    model(x)
        """,
        [PLAIN] * 6 + [EVALUATED] + [PLAIN] * 5,
    ),
    "one loop for both": (
        """
        for epoch in range(2):
            for training, batches in ((True, loader), (False, held_out)):
                model.train(training)
                for x, y in batches:
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(training):
                        loss = loss_of(x, y)
                    if training:
                        loss.backward()
                        optimizer.step()
        """,
        [PLAIN] * 6 + [EVALUATED] + [PLAIN] * 5,
    ),
    "within an epoch": (
        """
        for i, (x, y) in enumerate(loader):
            learn(x, y)
            if i == 2:
                evaluate()
        """,
        [PLAIN] * 3 + [EVALUATED] + [PLAIN] * 2,
    ),
    "a single batch": (
        """
        one = DataLoader(data, batch_size=24)
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            for x, y in one:
                with torch.no_grad():
                    model(x)
        """,
        [PLAIN] * 6 + [PLAIN | {"evaluate": 2}] + [PLAIN] * 5,
    ),
    "an average of the model": (
        """
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
                average.update_parameters(model)
            for x, y in held_out:
                with torch.no_grad():
                    average(x)
        """,
        # Nobody trains the average: its forwards are not looked at, its batches are.
        [PLAIN] * 6 + [PLAIN | {"evaluate": 3}] + [PLAIN] * 5,
    ),
    "a model in evaluation mode that is trained": (
        """
        model.eval()
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
            evaluate()
        """,
        [PLAIN] * 6 + [EVALUATED] + [PLAIN] * 5,
    ),
    "a new loader for each epoch": (
        """
        for epoch in range(3):
            for x, y in DataLoader(data, batch_size=8):
                learn(x, y)
        """,
        [PLAIN] * 9,
    ),
    "two loaders at once": (
        """
        for epoch in range(2):
            for (x, y), (u, v) in zip(loader, DataLoader(data, batch_size=4)):
                learn(torch.cat([x, u]), torch.cat([y, v]))
        """,
        [PLAIN | {"dataloader_next": 2}] * 12,
    ),
}

OPTIMIZERS: Loops = {
    "one for each parameter, in the backward": (
        """
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for x, y in loader:
            loss_of(x, y).backward()
        for _ in range(2):
            loss_of(torch.ones(4, 4), torch.ones(4, 1)).backward()
        """,
        [PLAIN | {"optimizer": 4}] * 6 + [NO_LOADER | {"optimizer": 4}] * 2,
    ),
    "a closure for an optimizer that needs none": (
        """
        for x, y in loader:
            def closure():
                optimizer.zero_grad()
                loss = loss_of(x, y)
                loss.backward()
                return loss
            optimizer.step(closure)
        """,
        [PLAIN] * 6,
    ),
    "foreach, fused and plain": (
        """
        kinds = [dict(foreach=True), dict(fused=True), dict(foreach=False), dict(amsgrad=True), dict(maximize=True)]
        for kind in kinds:
            optimizer = torch.optim.AdamW(model.parameters(), **kind)
            learn(*next(iter(loader)), optimizer)
            model.zero_grad(set_to_none=False)
        """,
        [PLAIN] * 5,
    ),
    "groups that grow": (
        """
        growing = torch.optim.Adam(model[2].parameters())
        for i, (x, y) in enumerate(loader):
            if i == 3:
                growing.add_param_group({"params": model[0].parameters(), "lr": 0.1})
            learn(x, y, growing)
        """,
        [PLAIN] * 6,
    ),
    "autocast, scaler, clipping": (
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for x, y in loader:
            optimizer.zero_grad()
            second.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(other(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.step(second)
            scaler.update()
        """,
        [PLAIN | {"forward": 2, "optimizer": 2}] * 6,
    ),
    "several backwards for a batch": (
        """
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            out.sum().backward(retain_graph=True)
            torch.autograd.backward([out.mean(), (out * y).sum()])
            optimizer.step()
        """,
        [PLAIN | {"backward": 2}] * 6,
    ),
    "a backward of a backward": (
        """
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
            (loss + sum(g.pow(2).sum() for g in grads)).backward()
            optimizer.step()
        """,
        [PLAIN] * 6,
    ),
    "one loss for two optimizers without DataLoader": (
        """
        third = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss_of(torch.ones(4, 4), torch.ones(4, 1)).backward()
            optimizer.step()
            third.step()
        """,
        [NO_LOADER | {"optimizer": 2}] * 3,
    ),
    "every scheduler": (
        """
        from torch.optim import lr_scheduler as s, swa_utils
        kinds = [
            lambda o: s.LambdaLR(o, lambda n: 0.9**n),
            lambda o: s.MultiplicativeLR(o, lambda n: 0.9),
            lambda o: s.StepLR(o, 2),
            lambda o: s.MultiStepLR(o, [1]),
            lambda o: s.ConstantLR(o),
            lambda o: s.LinearLR(o),
            lambda o: s.ExponentialLR(o, 0.9),
            lambda o: s.SequentialLR(o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [1]),
            lambda o: s.PolynomialLR(o),
            lambda o: s.CosineAnnealingLR(o, 5),
            lambda o: s.ChainedScheduler([s.StepLR(o, 2), s.ExponentialLR(o, 0.9)]),
            lambda o: s.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
            lambda o: s.CosineAnnealingWarmRestarts(o, 2),
            lambda o: s.OneCycleLR(o, 0.1, total_steps=40),
            lambda o: swa_utils.SWALR(o, 0.05),
        ]
        made = {type(kind(torch.optim.SGD(model.parameters(), lr=0.1))) for kind in kinds}
        assert made >= {t for t in vars(s).values() if isinstance(t, type) and issubclass(t, s.LRScheduler)} - {
            s.LRScheduler, s._LRScheduler, s.ReduceLROnPlateau}
        for kind in kinds:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = kind(optimizer)
            for _ in range(2):
                learn(torch.ones(4, 4), torch.ones(4, 1), optimizer)
                scheduler.step()
        """,
        [NO_LOADER | {"step_lr_schedulers": 1}] * 30,
    ),
    "a model for each fold": (
        """
        folds = []
        def parameters():
            return folds
        for fold in range(3):
            mine = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(x, y, mine).backward()
                optimizer.step()
            folds += [p.detach().clone() for p in mine.parameters()]
            del mine, optimizer
        """,
        [PLAIN] * 18,
    ),
    "a functional call": (
        """
        from torch.func import functional_call
        for x, y in loader:
            optimizer.zero_grad()
            out = functional_call(model, dict(model.named_parameters()), (x,))
            nn.functional.mse_loss(out, y).backward()
            optimizer.step()
        """,
        [PLAIN] * 6,
    ),
    "gradients of a function": (
        """
        from torch.func import functional_call, grad
        def loss(parameters, x, y):
            return nn.functional.mse_loss(functional_call(model, parameters, (x,)), y)
        for x, y in loader:
            for (_, p), g in zip(model.named_parameters(), grad(loss)(dict(model.named_parameters()), x, y).values()):
                p.grad = g
            optimizer.step()
        """,
        [{name: 1 for name in PLAIN if name != "backward"}] * 6,
    ),
    "no module at all": (
        """
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            weight.pow(2).sum().backward()
            optimizer.step()
        """,
        [{"backward": 1, "optimizer": 1}] * 3,
    ),
    "checkpoints, reentrant and not": (
        """
        from torch.utils.checkpoint import checkpoint
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model
            def forward(self, x):
                return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)
        outer = Checkpointed()
        for reentrant in (True, False):
            for x, y in held_out:
                optimizer.zero_grad()
                loss_of(x, y, outer).backward()
                optimizer.step()
        """,
        [PLAIN] * 6,
    ),
}

DATA: Loops = {
    "an iterable data set": (
        """
        from torch.utils.data import IterableDataset
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(data)
        loader = DataLoader(Stream(), batch_size=4)
        for epoch in range(2):
            for x, y in loader:
                learn(x, y)
        """,
        [PLAIN] * 12,
    ),
    "worker processes that use models": (
        """
        augment = nn.Linear(4, 4)
        def collate(samples):
            x, y = torch.utils.data.default_collate(samples)
            return augment(x).detach(), y
        how = dict(persistent_workers=True, multiprocessing_context="fork")
        workers = DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate, **how)
        for epoch in range(2):
            for x, y in workers:
                learn(x, y)
        del workers
        """,
        [PLAIN] * 12,
    ),
    "a batch whose shape is not to be had": (
        """
        class Ragged:
            def __init__(self, samples):
                self.samples = samples
            @property
            def shape(self):
                raise RuntimeError("no shape")
        for batch in DataLoader(data, batch_size=4, collate_fn=Ragged):
            learn(*torch.utils.data.default_collate(batch.samples))
        """,
        [PLAIN] * 6,
    ),
    "no automatic batches": (
        """
        for x, y in DataLoader(data, batch_size=None, sampler=range(0, 24, 8)):
            learn(x, y)
        """,
        [PLAIN] * 3,
    ),
    "trained in another thread": (
        """
        import threading
        def train():
            for epoch in range(2):
                for x, y in held_out:
                    learn(x, y)
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """,
        [PLAIN] * 6,
    ),
    "fetched by another thread during the forward": (
        """
        import threading
        def fetch():
            torch.set_grad_enabled(len(ahead) % 2 == 0)
            ahead.append(next(batches, None))
        class Ahead(nn.Module):
            def forward(self, x):
                thread = threading.Thread(target=fetch)
                thread.start()
                thread.join()
                return x
        model.append(Ahead())
        batches, ahead = iter(loader), [data[:4]]
        while ahead[-1]:
            learn(*ahead[-1])
        """,
        [NO_LOADER | {"dataloader_next": 1}] * 6 + [NO_LOADER],
    ),
}

INTERRUPTED: Loops = {
    "a forward": (
        """
        for i, (x, y) in enumerate(loader):
            try:
                learn(x if i != 2 else x[:, :3], y)
            except RuntimeError:
                pass
        """,
        [PLAIN] * 2 + [PLAIN | {"dataloader_next": 2, "prepare_batch": 2, "forward": 2}] + [PLAIN] * 2,
    ),
    "a forward of another model": (
        """
        learn(torch.ones(4, 4), torch.ones(4, 1))
        for i in range(4):
            try:
                second.zero_grad()
                other(torch.ones(4, 3 if i == 2 else 4)).sum().backward()
                second.step()
            except RuntimeError:
                pass
        learn(torch.ones(4, 4), torch.ones(4, 1))
        """,
        [NO_LOADER] * 3 + [NO_LOADER | {"forward": 2}, NO_LOADER],
    ),
    "a backward, from the keyboard": (
        """
        def interrupt(_):
            raise KeyboardInterrupt
        for i in range(4):
            out = model(torch.ones(4, 4))
            if i == 1:
                out.register_hook(interrupt)
            try:
                optimizer.zero_grad()
                out.sum().backward()
                optimizer.step()
            except KeyboardInterrupt:
                pass
        """,
        [NO_LOADER, NO_LOADER | {"forward": 2, "backward": 2}, NO_LOADER],
    ),
    "a forward, from the keyboard": (
        """
        class Interrupted(nn.Module):
            def forward(self, x):
                if i == 1:
                    raise KeyboardInterrupt
                return x
        model.append(Interrupted())
        for i, (x, y) in enumerate(held_out):
            try:
                learn(x, y)
            except KeyboardInterrupt:
                pass
        """,
        [PLAIN, PLAIN | {"dataloader_next": 2, "prepare_batch": 2}],
    ),
    "a fetch": (
        """
        class Broken(torch.utils.data.Dataset):
            def __len__(self):
                return 12
            def __getitem__(self, i):
                if i == 5:
                    raise KeyboardInterrupt
                return data[i]
        batches = iter(DataLoader(Broken(), batch_size=4))
        while True:
            try:
                learn(*next(batches))
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
        """,
        [PLAIN] * 2,
    ),
    "an optimizer, and another goes on": (
        """
        class Bad(torch.optim.SGD):
            def step(self, closure=None):
                raise ValueError
        bad = Bad(model.parameters(), lr=0.1)
        for i in range(4):
            try:
                learn(torch.ones(4, 4), torch.ones(4, 1), bad if i == 1 else optimizer)
            except ValueError:
                pass
        """,
        [NO_LOADER, NO_LOADER | {"forward": 2, "backward": 2}, NO_LOADER],
    ),
    "a scheduler": (
        """
        raising = True
        def rate(n):
            if n == 1 and raising:
                raise ValueError
            return 1.0
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        for i in range(2):
            learn(torch.ones(4, 4), torch.ones(4, 1))
            try:
                scheduler.step()
            except ValueError:
                raising = False
        """,
        [NO_LOADER | {"step_lr_schedulers": 1}] * 2,
    ),
}

ODD: Loops = {
    "a thread infers while the model trains": (
        """
        import threading
        class Watched(nn.Module):
            def forward(self, x):
                if torch.is_grad_enabled():  # an actor asks the model in the middle of its forward
                    actor = threading.Thread(target=infer, args=(x.detach(),))
                    actor.start()
                    actor.join()
                return x
        def infer(x):
            with torch.no_grad():
                watched(x)
        watched = nn.Sequential(Watched(), model)
        for x, y in held_out:
            optimizer.zero_grad()
            loss_of(x, y, watched).backward()
            optimizer.step()
        """,
        [PLAIN | {"evaluate": 1}] * 3,
    ),
    "another thread trains on what is fetched": (
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as pool:
            for epoch in range(2):
                for x, y in held_out:
                    pool.submit(learn, x, y).result()
        """,
        # The first batch was fetched before anybody had trained; the others are in the step before their own.
        [PLAIN | {"dataloader_next": 2}, *[NO_LOADER | {"dataloader_next": 1}] * 4, NO_LOADER],
    ),
    "an optimizer without a hash": (
        """
        class Equal(torch.optim.SGD):
            def __eq__(self, other):
                return type(self) is type(other)
        for name in ("one", "two"):
            fold = nn.Linear(4, 1)
            equal = Equal(fold.parameters(), lr=0.1)
            for _ in range(2):
                equal.zero_grad()
                fold(torch.ones(4, 4)).sum().backward()
                equal.step()
        """,
        [NO_LOADER] * 4,
    ),
    "tensors are pickled, and a model is saved": (
        """
        import io, pickle
        for x, y in held_out:
            learn(x, y)
            pickle.dumps(model)
        torch.save(model, io.BytesIO())
        """,
        [PLAIN] * 2 + [PLAIN | {"checkpoint": 1}],
    ),
}

ORDER = ["forward", "backward", "optimizer"]
LINE_SEARCH = """
search = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
for x, y in loader:
    def closure():
        search.zero_grad(set_to_none=False)
        loss = loss_of(x, y)
        loss.backward()
        return loss
    search.step(closure)
"""
UNTRACED = """
import time, otel_dltrace
from otel_dltrace.instrument import registry
from otel_dltrace.record.tracer import live
for x, y in held_out:
    learn(x, y)
evaluate()
otel_dltrace.uninstrument()
evaluate()
time.sleep(0.05)
learn(x, y)
if live.tracer is not None:
    registry.instrument()
for x, y in held_out:
    learn(x, y)
"""
LOOPS = {
    f"{kind}: {name}": loop
    for kind, loops in [
        ("evaluation", EVALUATIONS),
        ("optimizers", OPTIMIZERS),
        ("data", DATA),
        ("interrupted", INTERRUPTED),
        ("odd", ODD),
    ]
    for name, loop in loops.items()
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What each loop recorded, and whether it computed the same untraced."""
    programs = {name: loop[0] for name, loop in LOOPS.items()} | {"line search": LINE_SEARCH, "untraced": UNTRACED}
    return run_each(tmp_path_factory.mktemp("loops"), SETUP, programs)


@pytest.mark.parametrize("name", LOOPS)
def test_steps_and_stages_are_those_of_the_loop(name: str, recorded: Ran) -> None:
    """One step per optimizer cycle, with its stages and nothing else; and what is learned stays the same."""
    check(recorded[name], LOOPS[name][1])


def test_a_step_ends_where_it_is_seen_no_more(recorded: Ran) -> None:
    """What comes after `uninstrument` is in no step; it was in the last one, or, behind an evaluation, in the next."""
    spans, same = recorded["untraced"]
    assert same
    assert [spans.stages(step) for step in spans.steps()] == [*[PLAIN] * 3, EVALUATED, *[PLAIN] * 2]
    before, behind = spans.spans("step")[2:4]
    stages = [stage for stage in spans.spans("stage") if stage.name != "evaluate"]
    assert before.end == max(stage.end for stage in stages if stage.step == before.step)
    assert behind.start == min(stage.start for stage in stages if stage.step == behind.step)


def test_an_optimizer_s_time_is_without_its_closure_s(recorded: Ran) -> None:
    """However often a line search asks its closure, the stages follow one another and none holds another."""
    spans, same = recorded["line search"]
    assert same
    assert spans.steps() == list(range(6))
    assert all(spans.stages(step)["optimizer"] == spans.stages(step)["forward"] > 1 for step in spans.steps())
    for step in spans.spans("step"):
        stages = [stage for stage in spans.spans("stage") if stage.step == step.step]
        assert sum(stage.size for stage in stages) <= step.end - step.start
    pieces = [stage for stage in spans.records if stage.descriptor.kind == "stage" and stage.name in ORDER]
    assert [piece.name for piece in pieces] == ORDER * (len(pieces) // 3)


WORKERS = (
    """
import otel_dltrace
otel_dltrace.instrument()
"""
    + SETUP
    + """
def collate(samples):
    with otel_dltrace.phase("load"):
        x, y = torch.utils.data.default_collate(samples)
        return other(x).detach(), y

for x, y in DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate, multiprocessing_context="fork"):
    learn(x, y)
"""
)


def test_a_process_that_loads_batches_has_no_ring(tmp_path: Path) -> None:
    """Models and phases in a DataLoader's workers are no part of a rank's steps."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OTEL_DLTRACE_DRAIN": "off", "OTEL_DLTRACE_RING_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, but_for_rings(done.stderr)) == (0, "")
    assert len(list(tmp_path.glob("*.ring"))) == 1
