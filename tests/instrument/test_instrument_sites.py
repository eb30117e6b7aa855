"""Sites: put in place when a module comes, taken away without trace, and never in the program's way."""

import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.instrument import _sites
from otel_dltrace.instrument._sites import Attachment, Site, applies, install, resolve
from otel_dltrace.instrument.registry import TABLES, Registry
from otel_dltrace.instrument.torch_training import batch_size
from otel_dltrace.record import guard
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live
from tests.support.paths import ROOT
from tests.support.torch_harness import COMPILES
from tests.support.warm import warm

has_torch = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not has_torch, reason="torch is not installed")

LIBRARY = """
def double(x):
    if x == "bad":
        raise KeyError(x)
    return 2 * x

class Handle:
    def wait(self):
        return self
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a module, a second one that imports a name from it, and nothing loaded."""
    package = tmp_path / "sitelib"
    package.mkdir()
    (package / "__init__.py").write_text("from .core import *\n")
    (package / "core.py").write_text(LIBRARY)
    (package / "user.py").write_text("from .core import double as twice\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "sitelib"]:
        del sys.modules[name]


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[Tracer]:
    """Tracing, switched on."""
    live.tracer = Tracer(Recorder(tmp_path / "rings", 1 << 20))
    yield live.tracer
    live.tracer.recorder.close()
    live.tracer = None


class Seen(list[tuple[Any, ...]]):
    """What a site saw."""

    def site(self, name: str) -> Site:
        """Return a site on *name* that notes down everything."""

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            self.append(("begin", args[-1:], kwargs))
            return "span"

        return Site(
            "sitelib.core",
            name,
            begin,
            lambda span, result: self.append(("finish", span, result)),
            lambda span, error: self.append(("fail", span, type(error))),
        )


def test_a_function_is_traced_wherever_it_was_imported_to(library: Path, tracer: Tracer) -> None:
    """Modules loaded before us hold the function under names of their own."""
    core, user, package = (importlib.import_module(name) for name in ("sitelib.core", "sitelib.user", "sitelib"))
    before = core.double
    seen = Seen()
    registry = Registry({"library": [seen.site("double"), seen.site("Handle.wait")]})
    registry.watch()
    registry.watch()

    assert [core.double(1), user.twice(2), package.double(x=3)] == [2, 4, 6]
    handle = core.Handle()
    assert handle.wait() is handle
    assert [name for name, *_ in seen] == ["begin", "finish"] * 4
    assert (core.double.__name__, core.double.__wrapped__) == ("double", before)

    registry.unwatch()
    registry.unwatch()
    assert [core.double, user.twice, package.double] == [before] * 3
    assert core.double is before


def test_a_module_is_patched_before_its_importer_goes_on(library: Path, tracer: Tracer) -> None:
    """Names imported from it are the traced ones, and its loader stays what it was."""
    seen = Seen()
    registry = Registry({"library": [seen.site("double")]})
    registry.watch()
    try:
        assert "sitelib" not in sys.modules
        user = importlib.import_module("sitelib.user")
        core = sys.modules["sitelib.core"]
        assert user.twice(2) == 4
        assert seen == [("begin", (2,), {}), ("finish", "span", 4)]
        assert "exec_module" not in vars(core.__spec__.loader)
        assert type(core.__spec__.loader) is type(user.__spec__.loader)
    finally:
        registry.unwatch()
    assert not hasattr(core.double, "__wrapped__")


def test_a_watcher_that_asks_all_finders_again_finds_us_once(library: Path, tracer: Tracer) -> None:
    """As those of wrapt and ddtrace do, whichever of us came first."""

    class Watcher:
        def find_spec(self, name: str, *_: object) -> object:
            if not name.startswith("sitelib") or self.busy:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

        busy = False

    seen = Seen()
    registry = Registry({"library": [seen.site("double")]})
    before, after = Watcher(), Watcher()
    sys.meta_path.insert(0, after)
    registry.watch()
    sys.meta_path.insert(0, before)
    try:
        assert importlib.import_module("sitelib.user").twice(2) == 4
        assert seen == [("begin", (2,), {}), ("finish", "span", 4)]
    finally:
        registry.unwatch()
        sys.meta_path.remove(before)
        sys.meta_path.remove(after)


def test_the_error_of_the_function_leaves_unmodified(library: Path, tracer: Tracer) -> None:
    """The same object, without cause or context of ours."""
    core = importlib.import_module("sitelib.core")
    seen = Seen()
    install([seen.site("double")], core, aliases=False)
    with pytest.raises(KeyError) as caught:
        core.double("bad")
    assert (caught.value.__cause__, caught.value.__context__, caught.value.args) == (None, None, ("bad",))
    assert seen == [("begin", ("bad",), {}), ("fail", "span", KeyError)]


def test_our_own_error_is_told_once_and_the_call_goes_on(
    library: Path, tracer: Tracer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks in a site, the program gets its result."""
    monkeypatch.setattr(guard, "_said", type(guard._said)())
    core = importlib.import_module("sitelib.core")

    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    install([Site("sitelib.core", "double", broken)], core, aliases=False)
    install([Site("sitelib.core", "Handle.wait", lambda *_: 1, broken)], core, aliases=False)
    assert [core.double(1), core.double(2)] == [2, 4]
    assert isinstance(core.Handle().wait(), core.Handle)
    assert capsys.readouterr().err.count("not traced (RuntimeError: ours)") >= 1


def test_a_function_may_have_attributes_of_any_name(library: Path, tracer: Tracer) -> None:
    """Somebody's decorator says ``traced = True`` of a function, which is called all the same."""
    core = importlib.import_module("sitelib.core")
    core.double.traced = True
    install([Seen().site("double")], core, aliases=False)
    assert core.double(4) == 8


def test_with_tracing_off_nothing_is_asked(library: Path) -> None:
    """A wrapped function without a tracer is the function."""
    core = importlib.import_module("sitelib.core")
    seen = Seen()
    install([seen.site("double")], core, aliases=False)
    assert live.tracer is None
    assert core.double(4) == 8
    assert seen == []


def test_a_level_that_is_too_low_asks_nothing(library: Path, tracer: Tracer) -> None:
    """A site above the recorded level is passed through."""
    core = importlib.import_module("sitelib.core")
    seen: list[object] = []
    site = Site("sitelib.core", "double", lambda *_: seen.append(1), level=4)
    install([site], core, aliases=False)
    assert (core.double(1), seen) == (2, [])


def test_a_function_that_is_not_there_is_skipped(library: Path, tracer: Tracer) -> None:
    """A row for another version of the framework harms nothing."""
    core = importlib.import_module("sitelib.core")
    assert (
        install(
            [Site("sitelib.core", name, lambda *_: None) for name in ("gone", "Gone.x", "Handle.gone")],
            core,
            aliases=True,
        )
        == []
    )


@pytest.mark.parametrize(
    ("since", "until", "version", "traced"),
    [
        pytest.param("2.8", "", "2.8.0+cpu", True, id="its first version"),
        pytest.param("2.8", "", "2.13.0a0+git1", True, id="a later one"),
        pytest.param("2.8", "", "2.7.1", False, id="an earlier one"),
        pytest.param("", "2.10", "2.9.1", True, id="its last version"),
        pytest.param("", "2.10", "2.10.0", False, id="too late"),
        pytest.param("2.8", "", "", True, id="a version nobody knows"),
    ],
)
def test_a_row_for_other_versions_is_skipped_silently(
    since: str, until: str, version: str, traced: bool, library: Path, tracer: Tracer, caplog: pytest.LogCaptureFixture
) -> None:
    """A row says since which version and until which."""
    core = importlib.import_module("sitelib.core")
    sys.modules["sitelib"].__version__ = version
    with caplog.at_level("DEBUG", logger=_sites.log.name):
        sites = [Site("sitelib.core", "double", lambda *_: None, since=since, until=until)]
        assert bool(install(sites, core, aliases=False)) == traced
    assert caplog.messages == []


def test_who_patched_after_us_keeps_their_patch(library: Path, tracer: Tracer) -> None:
    """Taking ours away leaves theirs in place, and it still works."""
    core = importlib.import_module("sitelib.core")
    undos = install([Seen().site("double")], core, aliases=False)
    ours = core.double
    core.double = theirs = lambda x: ours(x) + 1
    for undo in undos:
        undo()
    assert core.double is theirs
    assert core.double(1) == 3


def test_what_a_program_imported_by_name_traces_while_its_site_is_there(library: Path, tracer: Tracer) -> None:
    """A module outside of the framework keeps our wrapper, which passes calls through until we are back."""
    core = importlib.import_module("sitelib.core")
    seen = Seen()
    registry = Registry({"library": [seen.site("double")]})
    registry.watch()
    kept, counts = core.double, []
    for change in (registry.unwatch, registry.watch, registry.unwatch):
        change()
        assert kept(1) == 2
        counts.append(len(seen))

    assert counts == [0, 2, 2]


def test_what_was_attached_is_detached_last_one_first(library: Path) -> None:
    """Undoing goes the way back."""
    done: list[str] = []

    def attach(name: str) -> Attachment:
        return Attachment("sitelib.core", lambda _: lambda: done.append(name))

    importlib.import_module("sitelib.core")
    registry = Registry({"library": [attach("first"), attach("second")]})
    registry.watch()
    registry.unwatch()
    assert done == ["second", "first"]


def test_what_cannot_be_attached_costs_itself_alone(
    library: Path, tracer: Tracer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A framework of another version: one sentence, and the rest is put in place and taken away as ever."""

    def attach(module: types.ModuleType) -> Callable[[], None]:
        raise AttributeError("there is no such hook")

    monkeypatch.setattr(guard, "_said", set())
    seen = Seen()
    core = importlib.import_module("sitelib.core")
    original = core.double
    registry = Registry({"library": [Attachment("sitelib.core", attach), seen.site("double")]})
    registry.watch()
    assert core.double(1) == 2
    registry.unwatch()

    assert core.double is original
    assert seen == [("begin", (1,), {}), ("finish", "span", 2)]
    assert "there is no such hook" in capsys.readouterr().err


def test_a_watch_imports_nothing() -> None:
    """Nothing is loaded because of us; what needs no framework needs no numpy either."""
    program = """
    import sys
    sys.modules["numpy"] = None
    from otel_dltrace.instrument import registry
    registry.instrument()
    registry.instrument()
    assert len([f for f in sys.meta_path if type(f).__module__.startswith("otel_dltrace")]) == 1
    registry.uninstrument()
    assert not [f for f in sys.meta_path if type(f).__module__.startswith("otel_dltrace")]
    print(sorted(m for m in sys.modules if m.partition(".")[0] in ("torch", "opentelemetry", "pyarrow", "grpc")))
    """
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


ROWS = [row for rows in TABLES.values() for row in rows]
SITES = [row for row in ROWS if isinstance(row, Site) and not row.module.startswith(("byteps.", "horovod."))]
"""All but those of BytePS, which cannot be installed: test_byteps_adapter holds them against its sdist."""


@needs_torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, as torch.distributed.optim is imported
@pytest.mark.parametrize("row", SITES, ids=lambda site: f"{site.module}.{site.name}")
def test_every_row_is_there_in_the_installed_framework(row: Site) -> None:
    """A renamed function is found here, not by a user who misses spans; a row for other versions has nothing here."""
    pytest.importorskip(row.module.partition(".")[0])
    is_there = importlib.util.find_spec(row.module) is not None
    found = resolve(importlib.import_module(row.module), row.name) if is_there else None
    assert (found is not None and callable(found[2])) == applies(row)


RESTORED = """
import importlib, importlib.util, sys, types, warnings
sys.path.insert(0, {root!r})
warnings.simplefilter("ignore")
import torch, torch._dynamo, torch.distributed, torch.nn.parallel, torch.utils.data
import opentelemetry.sdk.trace
from torch.distributed import all_reduce
from otel_dltrace.instrument import registry
from otel_dltrace.instrument._sites import Site, applies, resolve

rows = [row for rows in registry.TABLES.values() for row in rows]
sites = [row for row in rows if isinstance(row, Site) and not row.module.startswith(("byteps.", "horovod."))]
sites = [site for site in sites if importlib.util.find_spec(site.module.partition(".")[0])]
for package in {{site.module.partition(".")[0] for site in sites}}:
    importlib.import_module(package)  # its version says which rows are for it
sites = [site for site in sites if applies(site)]
for site in sites:
    importlib.import_module(site.module)

def objects():
    found = {{}}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            found.update({{(name, k): v for k, v in list(vars(module).items()) if k not in ("__warningregistry__",)}})
    for site in sites:
        found[site.module, site.name] = resolve(sys.modules[site.module], site.name)[2]
    return found

optimizer = sys.modules["torch.optim.optimizer"]
before = objects()
for _ in range(2):
    registry.instrument()
    wrapped = objects()
    changed = [site for site in sites if wrapped[site.module, site.name] is before[site.module, site.name]]
    assert not changed, changed
    assert torch.distributed.all_reduce is torch.distributed.distributed_c10d.all_reduce
    assert torch.distributed.all_reduce is not all_reduce
    registry.uninstrument()
    after = objects()
    assert before.keys() == after.keys()
    assert [k for k in before if before[k] is not after[k]] == []
    assert torch.distributed.all_reduce is all_reduce
    assert not torch.nn.modules.module._has_any_global_hook()
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
"""


@needs_torch
def test_uninstrument_leaves_every_object_the_one_it_was() -> None:
    """Every name of every torch module, and every row of every table, is the same object as before."""
    done = subprocess.run(
        [sys.executable, "-c", RESTORED.format(root=str(ROOT))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


EARLY = """
import os
from pathlib import Path
from otel_dltrace.instrument import registry
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

registry.instrument()
import copy, io, warnings
warnings.simplefilter("error")
import torch, torch._dynamo, torch.distributed as dist  # optimizers load dynamo; once is enough
from torch import nn
from torch.distributed import all_reduce
assert all_reduce is dist.distributed_c10d.all_reduce is dist.all_reduce
assert all_reduce.__wrapped__ is not None
from otel_dltrace.instrument import _loop as loop

def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""
TRACED = """
live.tracer = Tracer(Recorder(Path(os.environ["RINGS"]), 1 << 20))
{program}
live.tracer.steps.end()
print(live.tracer.steps.upcoming)
"""

PROGRAMS = {
    "a compiled model": """
model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), fullgraph=True, backend="aot_eager")
train(model)
""",
    "a model that compiles itself": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.linear(x))

model = Model()
model.compile(fullgraph=True, backend="aot_eager")
train(model)
torch.save(model, io.BytesIO())
import gc, weakref
gone = weakref.ref(model)
del model
torch._dynamo.reset()
gc.collect()
assert gone() is None
""",
    "a compiled function": """
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
unused = torch.optim.SGD(model.parameters(), lr=0.1)  # without any each backward would be a step
call = torch.compile(lambda x: model(x) * 2, fullgraph=True, backend="aot_eager")
call(torch.ones(2, 4)).sum().backward()
train(model)
call(torch.ones(2, 4)).sum().backward()
""",
    "a model that is saved whole and copied": """
model = nn.Linear(4, 4)
train(model, 2)
file = io.BytesIO()
torch.save(model, file)
assert b"otel_dltrace" not in file.getvalue()
file.seek(0)
again = torch.load(file, weights_only=False)
assert again(torch.ones(1, 4)).shape == copy.deepcopy(model)(torch.ones(1, 4)).shape
train(model, 1)
""",
    "a model of which CUDA graphs are made": """
made = []

def make(callables, sample_args):  # as torch does, which needs a device for more
    made.extend(callables)
    for module in callables:
        assert not module._forward_hooks and not module._forward_pre_hooks
        module(*sample_args)
    return callables

import torch.cuda.graphs
from otel_dltrace.instrument._sites import wrap
from otel_dltrace.instrument.torch_training import ROWS
(site,) = [row for row in ROWS if getattr(row, "name", "") == "make_graphed_callables"]
model = nn.Linear(4, 4)
wrap(site, make)((model,), (torch.ones(2, 4),))
train(model)
wrap(site, make)((model,), (torch.ones(2, 4),))
tracer, live.tracer = live.tracer, None  # as after `stop()`
wrap(site, make)(callables=(model,), sample_args=(torch.ones(2, 4),))
live.tracer = tracer
assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
try:
    torch.cuda.make_graphed_callables(model, (torch.ones(2, 4),))
except Exception as error:  # here is no device, or no graph of a tensor on the host
    assert "hooks" not in str(error), error
""",
    "a forward that raises": """
model = nn.Linear(4, 4)
train(model, 2)
try:
    model(torch.ones(2, 5))
except RuntimeError:
    pass
train(model, 1)
assert live.tracer.steps.upcoming == 3, live.tracer.steps.upcoming
""",
}


@needs_torch
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_under_tracing_what_it_did(name: str, tmp_path: Path) -> None:
    """No warning, no graph break, nothing of ours in what it saves; three steps in each."""
    if "compile" in PROGRAMS[name] and not COMPILES:
        pytest.skip("torch.compile wants Python 3.13.1")
    program = tmp_path / "program.py"
    program.write_text(TRACED.format(program=PROGRAMS[name]))
    done = warm(EARLY).run(program, [os.environ | {"RINGS": str(tmp_path)}])
    assert (done.codes, done.out, done.err) == ([0], "3\n", "")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        pytest.param(types.SimpleNamespace(shape=(8, 3)), 8, id="tensor"),
        pytest.param([types.SimpleNamespace(shape=(4,)), 1], 4, id="pair"),
        pytest.param({"label": 3, "ids": types.SimpleNamespace(shape=(5, 1))}, 5, id="mapping"),
        pytest.param(UserDict(ids=types.SimpleNamespace(shape=(7, 1))), 7, id="mapping of transformers"),
        pytest.param(["text", [types.SimpleNamespace(shape=()), types.SimpleNamespace(shape=(6,))]], 6, id="nested"),
        pytest.param("text", 0, id="no tensor"),
        pytest.param([], 0, id="empty"),
    ],
)
def test_the_batch_size_is_the_first_dimension_of_the_first_tensor(batch: object, size: int) -> None:
    """Batches come in every shape; what has no tensor near its top has no size."""
    assert batch_size(batch) == size


@pytest.mark.parametrize("kind", [dict, UserDict, Mapping])
def test_what_a_batch_computes_when_it_is_asked_for_is_not_computed_for_its_size(kind: type) -> None:
    """A lazy mapping, such as one that decodes images, computes what the program asks for, when it does."""
    asked: list[object] = []

    class Lazy(kind):  # type: ignore[misc]
        def __getitem__(self, key: object) -> object:
            asked.append(key)
            return types.SimpleNamespace(shape=(5, 1))

        def __iter__(self) -> Iterator[object]:
            return iter(["image"])

        def __len__(self) -> int:
            return 1

        def values(self) -> list[object]:
            return [self[key] for key in self]

    assert (batch_size(Lazy()), asked) == (0, [])


def test_a_debug_line_names_the_row_that_is_missing(
    library: Path, tracer: Tracer, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by default and impossible: one debug line."""
    core = importlib.import_module("sitelib.core")
    with caplog.at_level("DEBUG", logger=_sites.log.name):
        install([Site("sitelib.core", "gone", lambda *_: None)], core, aliases=False)
    assert caplog.messages == ["sitelib.core.gone is not there and not traced"]
