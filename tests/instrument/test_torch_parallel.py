"""Every way in which torch spreads a training over ranks, traced: the same numbers, and spans that torch confirms."""

import sys
import weakref
from collections.abc import Sequence
from itertools import groupby
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from otel_dltrace.instrument import torch_ddp, torch_fsdp
from otel_dltrace.instrument._sites import Site, applies, install
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.record.steps import Steps
from otel_dltrace.record.tracer import Tracer, live
from tests.support.paths import PROGRAMS
from tests.support.torch_harness import Recorded, Span, run

pytest.importorskip("torch")

RANKS = 3  # not a power of two: an average that is computed in another way shows in the last bit
PROGRAM = (PROGRAMS / "parallel.py").read_text()
OFF, PHASE, PARTITION = 0, 3, 4
BOUND, HOST_DONE = 4, 0
at_both_levels = pytest.mark.parametrize(
    "level", [pytest.param(PHASE, id="phase"), pytest.param(PARTITION, id="partition")]
)
Trained = dict[int, list[Recorded]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All programs untraced, at the level of everyday, and at the one that asks for the ends of buckets."""
    folder = tmp_path_factory.mktemp("parallel")
    return {
        level: run(folder / str(level), PROGRAM, RANKS, level, TORCH_FR_BUFFER_SIZE="2000")
        for level in (OFF, PHASE, PARTITION)
    }


def scenarios(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Return what the program said of each training, with *first*, the ordinal of its first step."""
    found, first = {}, 0
    for said in recorded.said:
        if "scenario" in said:
            found[said["scenario"]] = {**said, "first": first}
            first += said["steps"]
    return found


def spans_of(recorded: Recorded, scenario: str, kind: str = "collective") -> list[Span]:
    """Return the spans in the groups of *scenario*."""
    groups = scenarios(recorded)[scenario]["groups"]
    return [s for s in recorded.spans(kind) if s.descriptor.group in groups]


def spans_of_buckets(recorded: Recorded, scenario: str) -> list[Span]:
    """Return the spans of the gradient buckets of *scenario*."""
    return [s for s in spans_of(recorded, scenario) if s.descriptor.tensor]


WEIGHT = 48 * 48 * 4
"""Bytes of a layer's weight: every bucket holds more, nothing else does."""
WIDTHS = {"Float": 4, "Half": 2, "Long": 8, "Int": 4, "Byte": 1}
GLOO = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "all_reduce",
}
"""What Gloo calls the operations that it makes of others."""


Key = tuple[str, int]


def flown(recorded: Recorded, groups: Sequence[str]) -> dict[Key, tuple[str, int]]:
    """Return name and bytes of every collective that torch's own recorder has in *groups*, by group and number."""
    return {
        (e["group"], e["collective_seq_id"]): (e["profiling_name"].removeprefix("gloo:"), moved(e))
        for e in recorded.said[-1]["flight"]
        if e["group"] in groups and not e["is_p2p"]
    }


def moved(entry: dict[str, Any]) -> int:
    """Return the bytes of the larger side of a collective; of a scatter, only its root knows the inputs."""
    inputs, outputs = (
        sum(
            prod(size) * WIDTHS[dtype]
            for size, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
        )
        for side in ("input", "output")
    )
    return outputs * RANKS if entry["profiling_name"] == "gloo:scatter" else max(inputs, outputs)


def confirmed(span: Span, flown: dict[Key, tuple[str, int]]) -> tuple[str, int] | None:
    """Return name and bytes of what torch's own recorder has under the number of *span*."""
    group, seq = span.descriptor.group, span.seq
    if span.name != "broadcast_coalesced":
        return flown.get((group, seq))
    size = 0
    while size < span.size and flown[group, seq][0] == "broadcast":  # one for each type, the last one's number
        size += flown[group, seq][1]
        seq -= 1
    return span.name, size


@at_both_levels
def test_a_traced_training_computes_the_same(trained: Trained, level: int) -> None:
    """Parameters are equal to the bit on every rank, and so are the errors of hooks that fail or come second."""
    untraced, traced = (
        [[{k: v for k, v in said.items() if k != "flight"} for said in recorded.said] for recorded in trained[which]]
        for which in (OFF, level)
    )
    assert traced == untraced
    assert [len(said) for said in traced] == [len(scenarios(trained[level][0])) + 3] * RANKS


@at_both_levels
def test_every_optimizer_cycle_is_a_step(trained: Trained, level: int) -> None:
    """Ordinals go on without a gap on every rank, and each training's collectives lie in its own steps."""
    for recorded in trained[level]:
        found = scenarios(recorded)
        assert recorded.steps() == list(range(sum(said["steps"] for said in found.values())))
        for name, said in found.items():
            # A model is met in its first backward: what it calls before that belongs to the step before.
            before = said["first"] - 1 if said["first"] else NO_STEP
            steps = {s.step for s in spans_of(recorded, name)} - {before}
            assert steps <= set(range(said["first"], said["first"] + said["steps"])), name


@at_both_levels
def test_a_number_is_that_of_the_flight_recorder(trained: Trained, level: int) -> None:
    """Each numbered span is the operation, of the size, that torch's own recorder has there; in its order."""
    for recorded in trained[level]:
        numbered = [s for s in recorded.spans("collective") if s.seq]
        groups = {s.descriptor.group for s in numbered}
        expected = flown(recorded, [*groups])
        for span in numbered:
            assert (GLOO.get(span.name, span.name), span.size) == confirmed(span, expected)
        assert len({(s.descriptor.group, s.seq) for s in numbered}) == len(numbered) > 150
        for group in groups:
            order = [s.seq for s in numbered if s.descriptor.group == group and s.source != BOUND]
            assert order == sorted(order)


@at_both_levels
@pytest.mark.parametrize("scenario", ["fsdp1", "fsdp2", "tensor_parallel"])
def test_no_collective_of_the_flight_recorder_is_missing(trained: Trained, level: int, scenario: str) -> None:
    """What is called from Python is there, all of it, on every rank."""
    for recorded in trained[level]:
        expected = flown(recorded, scenarios(recorded)[scenario]["groups"])
        assert {(s.descriptor.group, s.seq) for s in spans_of(recorded, scenario)} == expected.keys()
        assert expected


FORWARD = [("all_gather", module) for module in ("FSDPBlocks", "blocks.0", "blocks.1")]
BACKWARD = [("all_gather", module) for module in ("blocks.1", "blocks.0")]
REDUCTION = [("reduce_scatter", module) for module in ("blocks.1", "blocks.0", "FSDPBlocks")]


def test_fsdp_says_which_module_it_gathers_and_reduces(trained: Trained) -> None:
    """Blocks gather for the forward and again for the backward; gradients are reduced after the second one."""
    for recorded in trained[PHASE]:
        said = scenarios(recorded)["fsdp2"]
        spans = spans_of(recorded, "fsdp2")
        for step in range(said["first"] + 1, said["first"] + said["steps"]):
            seen = [(s.name.removesuffix("_single"), s.descriptor.tensor) for s in spans if s.step == step]
            assert sorted(seen) == sorted(2 * (FORWARD + BACKWARD) + REDUCTION)
            assert seen[: len(FORWARD + BACKWARD)] == FORWARD + BACKWARD
            assert seen[-len(REDUCTION) :] == REDUCTION


def test_the_forward_of_fsdp_has_what_it_gathers_for_the_root(trained: Trained) -> None:
    """Its hook is part of the call: who waits there for others prepares no batch."""
    for recorded in trained[PHASE]:
        said = scenarios(recorded)["fsdp2"]
        roots = [s for s in spans_of(recorded, "fsdp2") if s.descriptor.tensor == "FSDPBlocks"]
        forwards = {s.step: s.start for s in recorded.spans("stage") if s.name == "forward"}
        for step in range(said["first"], said["first"] + said["steps"]):
            gathered = next(s for s in roots if s.step == step)
            assert gathered.name.startswith("all_gather")
            assert forwards[step] <= gathered.start


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param({"_module_fqn": "blocks.0", "module": object()}, "blocks.0", id="2.4"),
        pytest.param({"_module_fqn": None, "module": object()}, "object", id="the root of 2.4"),
        pytest.param({"_module_fqn": "blocks.0", "modules": (object(),)}, "blocks.0", id="since 2.5"),
        pytest.param({"_module_fqn": "", "modules": (object(), 1)}, "object", id="the root since 2.5"),
        pytest.param(
            {"_module_fqn": "blocks.0", "modules": (object(),), "_num_param_groups": 2, "_param_group_index": 1},
            "blocks.0 [1]",
            id="several groups, since 2.13",
        ),
    ],
)
def test_a_group_of_fsdp_says_its_module_in_every_version(group: dict[str, Any], name: str) -> None:
    """The root, which has no name, is called by its class."""
    assert torch_fsdp.name_of(SimpleNamespace(**group)) == name


@pytest.mark.parametrize(
    ("version", "module"),
    [
        pytest.param("2.4.0", "torch.distributed._composable.fsdp._fsdp_param_group", id="2.4"),
        pytest.param("2.5.1+cpu", "torch.distributed._composable.fsdp._fsdp_param_group", id="2.5"),
        pytest.param("2.6.0", "torch.distributed.fsdp._fully_shard._fsdp_param_group", id="2.6"),
    ],
)
def test_fsdp_is_traced_where_a_version_has_it(version: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was moved in 2.6."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    assert {row.module for row in torch_fsdp.ROWS if isinstance(row, Site) and applies(row)} == {module}


@at_both_levels
@pytest.mark.parametrize("scenario", ["gpipe", "one_f_one_b"])
def test_pipeline_stages_receive_what_the_others_send(trained: Trained, level: int, scenario: str) -> None:
    """Four activations go forward and four gradients come back in each step; the n-th is the n-th on both sides."""
    sent, received = (
        sorted(
            (rank, s.a, s.seq, s.size) if operation == "send" else (s.a, rank, s.seq, s.size)
            for rank, recorded in enumerate(trained[level])
            for s in spans_of(recorded, scenario, "p2p")
            if operation in s.name
        )
        for operation in ("send", "recv")
    )
    assert sent == received
    steps, micro = 3, 4
    assert [message[:2] for message in sent if message[3] == 48 * 4] == [
        (source, to)
        for source in range(RANKS)
        for to in (source - 1, source + 1)
        if 0 <= to < RANKS
        for _ in range(steps * micro)
    ]


# -- buckets ------------------------------------------------------------------------------------------

PLAIN = (
    "accumulation",
    "bucket_views",
    "call_in_backward",
    "join_by_present",
    "normalised",
    "static_graph",
    "two_static_graphs",
    "unused_parameters",
)


@pytest.mark.parametrize("scenario", PLAIN)
def test_where_ends_are_asked_for_every_bucket_has_one(trained: Trained, scenario: str) -> None:
    """Each all-reduce of gradients is there with its number and an end of its own, also where others interfere."""
    for recorded in trained[PARTITION]:
        spans = spans_of_buckets(recorded, scenario)
        gradients = {
            key
            for key, (name, size) in flown(recorded, scenarios(recorded)[scenario]["groups"]).items()
            if name == "all_reduce" and size > WEIGHT
        }
        assert {(s.descriptor.group, s.seq) for s in spans} == gradients
        assert {(s.name, s.source, s.flags) for s in spans} == {("all_reduce", HOST_DONE, 1)}
        assert len({s.end for s in spans}) == len(spans)


def test_without_asking_a_bucket_ends_somewhere_and_has_a_number_where_that_is_certain(trained: Trained) -> None:
    """A call in backward takes the certainty away, one more of DDP's for unused parameters, behind them, does not."""
    for recorded in trained[PHASE]:
        seen = {}
        for scenario in PLAIN:
            spans = spans_of_buckets(recorded, scenario)
            seen[scenario] = {(s.source, s.seq > 0) for s in spans}
        certain, uncertain = {(BOUND, True)}, {(BOUND, False)}
        assert seen == {
            "accumulation": certain,
            "bucket_views": certain,
            "call_in_backward": uncertain,
            "join_by_present": certain,
            "normalised": uncertain,
            "static_graph": certain,
            "two_static_graphs": certain | uncertain,
            "unused_parameters": certain,
        }


@pytest.mark.parametrize("scenario", ["static_graph", "two_static_graphs"])
def test_the_first_buckets_of_a_static_graph_are_there(trained: Trained, scenario: str) -> None:
    """DDP launches them all at the end of backward; a call of the program's, or another model, takes no number away."""
    for recorded in trained[PHASE]:
        said = scenarios(recorded)[scenario]
        spans = [s for s in spans_of_buckets(recorded, scenario) if s.step == said["first"]]
        (backward,) = (s for s in recorded.spans("stage", "backward") if s.step == said["first"])
        models = 2 if scenario == "two_static_graphs" else 1
        gradients = sorted(
            key
            for key, (name, size) in flown(recorded, said["groups"]).items()
            if name == "all_reduce" and size > WEIGHT
        )
        assert sorted((s.descriptor.group, s.seq) for s in spans) == gradients[:models]
        assert {(s.name, s.size, s.source, s.flags) for s in spans} == {("all_reduce", 4 * (WEIGHT + 192), BOUND, 1)}
        assert all(backward.start < s.start < backward.end for s in spans)


def test_the_hook_of_a_program_runs_inside_its_bucket(trained: Trained) -> None:
    """The bucket lasts until the hook's future is done and claims no number; what the hook calls has one."""
    for recorded in trained[PARTITION]:
        spans = spans_of(recorded, "own_hook")
        hooks = {s.number: s for s in spans if s.name == "comm_hook"}
        calls = [s for s in spans if s.name == "all_reduce"]
        assert len(hooks) == len(calls) > 3
        assert {s.parent for s in calls} == hooks.keys()
        assert all(hooks[s.parent].start <= s.start and s.size == hooks[s.parent].size and s.seq for s in calls)
        assert {(s.seq, s.source) for s in hooks.values()} == {(0, HOST_DONE)}


def test_a_hook_that_fails_leaves_a_failed_span(trained: Trained) -> None:
    """The error is the program's, as the computation shows; the span of its bucket says its type."""
    for recorded in trained[PARTITION]:
        (span,) = spans_of_buckets(recorded, "failing_hook")
        assert (span.name, span.flags & 2) == ("comm_hook", 2)
        assert recorded.errors == [(span.number, "ValueError")]


@at_both_levels
def test_a_hook_is_known_from_the_step_on_that_has_it(trained: Trained, level: int) -> None:
    """Before it the buckets are DDP's own all-reduces, after it they are the hook's."""
    for recorded in trained[level]:
        names = [s.name for s in spans_of_buckets(recorded, "late_hook")]
        assert [name for name, _ in groupby(names)] == ["all_reduce", "comm_hook"]


@pytest.mark.parametrize(
    ("level", "last"),
    [
        pytest.param(PHASE, ("all_reduce", "float16", True), id="phase"),
        pytest.param(PARTITION, ("comm_hook", "float32", False), id="partition, where ours calls torch's in Python"),
    ],
)
def test_a_bucket_of_a_hook_in_c_is_one_all_reduce(trained: Trained, level: int, last: tuple[str, str, bool]) -> None:
    """It has a number as without a hook, and the type that travels."""
    plain = ("all_reduce", "float32", True)
    for recorded in trained[level]:
        spans = spans_of_buckets(recorded, "built_in_hooks")
        told = [(s.name, s.descriptor.dtype, s.seq > 0) for s in spans]
        assert [one for one, _ in groupby(told)] == [plain, last]


def test_every_patched_function_of_torch_is_put_back() -> None:
    """What takes a program's hooks is the same object again as before."""
    dist = pytest.importorskip("torch.distributed")
    names = ("_register_comm_hook", "_register_builtin_comm_hook")
    before = [getattr(dist, name) for name in names]
    undos = install([row for row in torch_ddp.ROWS if row.module == dist.__name__], dist, aliases=True)
    patched = [getattr(dist, name) for name in names]
    for undo in reversed(undos):
        undo()
    assert [a is b for a, b in zip(before, patched, strict=True)] == [False, False]
    assert [getattr(dist, name) for name in names] == before


class Model:
    """What torch_ddp knows of a model."""

    def __init__(self) -> None:
        self.reducer = SimpleNamespace(get_backward_stats=lambda: [0])


def test_a_model_whose_backward_never_comes_is_let_go(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a forward and its backward nothing of ours keeps the model."""
    monkeypatch.setattr(live, "tracer", Tracer(steps.recorder))
    model = Model()
    gone = weakref.ref(model)
    torch_ddp._post_forward_begins((model,), {})
    torch_ddp._prepare_begins((model.reducer,), {})
    torch_ddp._post_forward_ended(model, None)
    del model

    assert gone() is None
    assert torch_ddp._backward_begins((), {}) == []
