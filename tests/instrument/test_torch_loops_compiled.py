"""Loops whose models, functions and optimizers are compiled: the same graphs, the same results, no warning."""

from pathlib import Path

import pytest

from tests.support.torch_harness import COMPILES, run, run_each
from tests.support.torch_loops import EVALUATED, PLAIN, SETUP, Loops, Ran, check

pytest.importorskip("torch")
if not COMPILES:
    pytest.skip("torch.compile wants Python 3.13.1", allow_module_level=True)

GRAPHS = """
import logging
import warnings
warnings.filterwarnings("ignore", ".*torch.jit.script.* is (deprecated|not supported)")
torch._logging.set_logs(dynamo=logging.ERROR)  # says that it leaves out the profiler's marks, ours or not

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return self.inner(x) * 2

def learn_with_call(x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(call(x), y).backward()
    optimizer.step()

def parameters():
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [*model.parameters(), torch.tensor(graphs)]
"""
COMPILER = """
compiled = torch.compile(lambda x: x + 1, backend="aot_eager")
compiled(torch.ones(1, requires_grad=True)).sum().backward()
torch._dynamo.reset()
"""
"""Loads the compiler, which takes longer than all that is compiled here."""
UNSEEN = {"dataloader_next": 1, "backward": 1, "optimizer": 1}
"""A step whose forward is inside a compiled function of the program's own."""

LOOPS: Loops = {
    "a model, evaluated too": (
        """
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(x, y, compiled).backward()
                optimizer.step()
            with torch.no_grad():
                for x, y in held_out:
                    compiled(x)
        """,
        [PLAIN] * 6 + [EVALUATED] + [PLAIN] * 5,
    ),
    "a model that compiles itself": (
        """
        wrapped = Wrapped()
        wrapped.compile(fullgraph=True, backend="eager")
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(x, y, wrapped).backward()
                optimizer.step()
            with torch.no_grad():
                for x, y in held_out:
                    wrapped(x)
        """,
        [PLAIN] * 6 + [EVALUATED] + [PLAIN] * 5,
    ),
    "a model that was used before": (
        """
        for x, y in held_out:
            learn(x, y)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for x, y in held_out:
            optimizer.zero_grad()
            loss_of(x, y, compiled).backward()
            optimizer.step()
        """,
        [PLAIN] * 6,
    ),
    "a function behind a model, trained together": (
        """
        call = torch.compile(lambda x: other(x * torch.ones(4)).mean(1, keepdim=True), fullgraph=True, backend="eager")
        both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        for x, y in loader:
            both.zero_grad()
            nn.functional.mse_loss(call(model(x)), y).backward()
            both.step()
        """,
        [PLAIN] * 6,
    ),
    "a part of a model": (
        """
        part = Wrapped()
        part.compile(fullgraph=True, backend="eager")
        outer = nn.Sequential(torch.compile(other, fullgraph=True, backend="eager"), part)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(x, y, outer).backward()
            optimizer.step()
        """,
        [PLAIN] * 6,
    ),
    "a function": (
        """
        call = torch.compile(lambda x: model(x) * 2, fullgraph=True, backend="aot_eager")
        for x, y in loader:
            learn_with_call(x, y)
        """,
        [UNSEEN] * 6,
    ),
    "a function without DataLoader": (
        """
        call = torch.compile(lambda x: model(x) * 2, fullgraph=True, backend="eager")
        for _ in range(3):
            learn_with_call(torch.ones(4, 4), torch.ones(4, 1))
        """,
        [{"backward": 1, "optimizer": 1}] * 3,
    ),
    "a loss": (
        """
        call = torch.compile(nn.functional.mse_loss, fullgraph=True, backend="eager")
        for x, y in loader:
            optimizer.zero_grad()
            call(model(x), y).backward()
            optimizer.step()
        """,
        [PLAIN] * 6,
    ),
    "a step with breaks": (
        """
        compiled = torch.compile(learn, backend="eager")
        for x, y in loader:
            compiled(x, y)
        """,
        [UNSEEN] * 6,
    ),
    "a function, after a forward that was seen, without DataLoader": (
        """
        model(torch.ones(1, 4))
        @torch.compile(fullgraph=True, backend="eager")
        def compiled(x, y):
            return nn.functional.mse_loss(model(x), y)
        for _ in range(5):
            optimizer.zero_grad()
            compiled(torch.ones(4, 4), torch.ones(4, 1)).backward()
            optimizer.step()
        """,
        # That forwards are not seen any more shows when an optimizer steps again without one.
        [{"forward": 1, "backward": 2, "optimizer": 2}] + [{"backward": 1, "optimizer": 1}] * 3,
    ),
    "forward and backward in one graph": (
        """
        torch._dynamo.config.trace_autograd_ops = True
        @torch.compile(fullgraph=True, backend="eager")
        def gradients(x, y):
            loss = loss_of(x, y)
            loss.backward()
            return loss.detach()
        for x, y in loader:
            optimizer.zero_grad()
            gradients(x, y)
            optimizer.step()
        """,
        [{"dataloader_next": 1, "optimizer": 1}] * 6,
    ),
    "an optimizer and its scheduler": (
        """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        @torch.compile(backend="eager")
        def update():
            optimizer.step()
            scheduler.step()
        for x, y in held_out:
            optimizer.zero_grad()
            loss_of(x, y).backward()
            update()
        """,
        [PLAIN | {"step_lr_schedulers": 1}] * 3,
    ),
    "an optimizer of the program's own in one graph": (
        """
        class Mine(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {})
            @torch.no_grad()
            def step(self):
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(parameter.grad, alpha=-0.1)
        mine = Mine(model.parameters())
        @torch.compile(fullgraph=True, backend="eager")
        def update():
            mine.step()
        for x, y in held_out:
            optimizer.zero_grad()
            loss_of(x, y).backward()
            update()
        """,
        # Nothing outside its graph tells that it has stepped.
        [{name: 3 for name in PLAIN if name != "optimizer"}],
    ),
    "checkpoints in a graph": (
        """
        from torch.utils.checkpoint import checkpoint
        class Checkpointed(Wrapped):
            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)
        compiled = torch.compile(Checkpointed(), fullgraph=True, backend="eager")
        for x, y in held_out:
            optimizer.zero_grad()
            loss_of(x, y, compiled).backward()
            optimizer.step()
        """,
        [PLAIN] * 3,
    ),
    "blocks of the program's own in a graph": (
        """
        import otel_dltrace
        class Marked(Wrapped):
            def forward(self, x):
                with otel_dltrace.phase("encode"), otel_dltrace.operation("exchange", size=4):
                    x = self.inner(x)
                with otel_dltrace.phase("forward"):
                    return x * 2
        for x, y in held_out:
            for fullgraph in (True, False):
                compiled = torch.compile(Marked(), fullgraph=fullgraph, backend="eager")
                optimizer.zero_grad()
                loss_of(x, y, compiled).backward()
            optimizer.step()
        @torch.compile(fullgraph=True, backend="eager")
        def marked(x):
            with otel_dltrace.step(batch_size=4):
                return x + 1
        marked(torch.ones(1))
        """,
        [PLAIN | {"forward": 2, "backward": 2}] * 3,
    ),
    "a backward that is compiled too": (
        """
        torch._dynamo.config.compiled_autograd = True
        compiled = torch.compile(model, backend="aot_eager")
        for x, y in held_out:
            optimizer.zero_grad()
            loss_of(x, y, compiled).backward()
            optimizer.step()
        """,
        [PLAIN] * 3,
    ),
    "an eager model behind a compiled one": (
        """
        compiled = torch.compile(model, backend="aot_eager")
        for x, y in held_out:
            learn(x, y)
            second.zero_grad()
            other(x).sum().backward()
            second.step()
        """.replace("learn(x, y)", "optimizer.zero_grad(); loss_of(x, y, compiled).backward(); optimizer.step()"),
        [PLAIN | {"forward": 2, "backward": 2, "optimizer": 2}] * 3,
    ),
    "an export in between": (
        """
        for x, y in held_out:
            learn(x, y)
            torch.export.export(model, (x,))
        """,
        [PLAIN] * 3,
    ),
    "scripted in between, a copy too": (
        """
        import copy
        for x, y in held_out:
            learn(x, y)
            scripted = [torch.jit.script(one) for one in (model, nn.Sequential(model), copy.deepcopy(model))]
            assert torch.equal(scripted[0](x), scripted[1](x)) and torch.equal(scripted[0](x), scripted[2](x))
        """,
        [PLAIN] * 3,
    ),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What each loop recorded, and whether it computed the same, in as many graphs, untraced."""
    programs = {name: loop[0] for name, loop in LOOPS.items()}
    return run_each(tmp_path_factory.mktemp("compiled"), SETUP + GRAPHS, programs, COMPILER)


@pytest.mark.parametrize("name", LOOPS)
def test_compiled_loops_keep_their_steps_and_their_graphs(name: str, recorded: Ran) -> None:
    """Steps and stages as far as they run outside of graphs; the graphs and what is learned stay the same."""
    check(recorded[name], LOOPS[name][1])


def test_blocks_leave_the_graph_of_an_untraced_program_whole(tmp_path: Path) -> None:
    """A program keeps its marks where nobody traces it."""
    run(
        tmp_path,
        """
        import otel_dltrace, torch

        @torch.compile(fullgraph=True, backend="eager")
        def marked(x):
            with otel_dltrace.step(3, batch_size=4, epoch=0), otel_dltrace.phase("encode", 4):
                with otel_dltrace.operation("exchange", size=4), otel_dltrace.phase("forward"):
                    return x + 1

        marked(torch.ones(1))
        """,
        level=0,
    )
