"""Every row of the table of calls: that it fits the installed PyTorch, and says what its Flight Recorder says."""

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.instrument._sites import resolve
from otel_dltrace.instrument._torch.calls import CALLS, FUNCTIONS, METHODS, OPERATORS, Call
from tests.support.paths import PROGRAMS
from tests.support.torch_harness import Recorded, Span, run

torch = pytest.importorskip("torch")

HERE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def version(text: str) -> tuple[int, ...]:
    """Return a version as numbers."""
    return tuple(int(part) for part in text.split("."))


def is_here(call: Call) -> bool:
    """Return whether the installed version has *call*, as its row says."""
    return (not call.since or version(call.since) <= HERE) and (not call.until or version(call.until) > HERE)


def parameters_of(function: Any) -> list[list[str]]:
    """Return the names of the parameters of each overload of *function*, in Python, pybind or an operator."""
    if hasattr(function, "overloads"):
        overloads = [getattr(function, name) for name in function.overloads()]
        return [[argument.name for argument in overload._schema.arguments] for overload in overloads]
    try:
        return [list(inspect.signature(function).parameters)]
    except (TypeError, ValueError):
        signatures = [line for line in function.__doc__.splitlines() if "(self" in line or "(process_group" in line]
        return [re.findall(r"[(,] ?(\w+): ", line) for line in signatures]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.module} {call.name}")
def test_a_row_fits_the_installed_version(call: Call) -> None:
    """The function is there as its row says since when, and its parameters are those of the row, in their order."""
    module = importlib.import_module(call.module)
    found = resolve(module, call.name)
    if found is None and call.is_operator:
        found = (None, "", eval(call.name))
    assert (found is not None) == is_here(call)
    if found is None:
        return
    named = call.parameters.split()
    # The binding of recv_anysource names none.
    assert any(names[: len(named)] == named or "arg0" in names for names in parameters_of(found[2]))
    read = {call.tensors, *(call.root or ()), call.options, call.group, *call.peer} - {""}
    assert read <= set(named)


def test_every_public_call_has_a_row() -> None:
    """What torch.distributed exports and is named like a communication is in the table, or made of what is."""
    words = ("reduce", "gather", "scatter", "broadcast", "barrier", "all_to_all", "send", "recv")
    public = {
        name
        for name in importlib.import_module("torch.distributed.distributed_c10d").__all__
        if any(word in name for word in words) and name[0].islower() and name != "reduce_op"
    }
    made_of_methods = {"isend", "irecv", "batch_isend_irecv"}
    assert public - {call.name for call in FUNCTIONS} == made_of_methods


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Two ranks that call every row."""
    program = (PROGRAMS / "calls.py").read_text()
    return run(tmp_path_factory.mktemp("calls"), program, 2, TORCH_FR_BUFFER_SIZE="2000")


def span_of(label: str) -> str:
    """Return the name of the span that the program's call *label* is."""
    how, name, *_ = label.split()
    rows = {"method": METHODS, "operator": OPERATORS}.get(how, FUNCTIONS)
    span = next(call.span for call in rows if call.name.rpartition(".")[2] == name)
    return f"{span}_coalesced" if how == "coalesced" and name != "broadcast" else span


def outline(span: Span) -> tuple[Any, ...]:
    """Return what all ranks and the Flight Recorder must agree upon."""
    return span.name, span.seq, span.size, span.descriptor.group, span.descriptor.backend


def test_every_row_says_what_the_flight_recorder_says(called: list[Recorded]) -> None:
    """Each call is one span, in order, with the bytes of the operations it is made of and the last one's number."""
    for recorded in called:
        expected: list[tuple[Any, ...]] = []
        for fields in recorded.said:
            flown, label = fields["flown"], fields["label"]
            calls = [[entry] for entry in flown] if "coalesced broadcast" in label else [flown]
            for parts in calls:
                # A monitored barrier is made of messages, which nobody notes; it counts as two.
                number = parts[-1][0] if parts else expected[-1][1] + 2
                size = sum(part[2] for part in parts)
                expected.append((span_of(label), number, size, "0", "gloo"))
        assert [outline(s) for s in recorded.spans("collective")] == expected


def test_both_ranks_record_the_same(called: list[Recorded]) -> None:
    """Name, number and bytes of every operation are alike on both sides, roots included."""
    first, second = ([(*outline(s), s.b, s.descriptor.dtype) for s in r.spans("collective")] for r in called)
    assert first == second


def test_a_call_that_was_waited_for_is_done(called: list[Recorded]) -> None:
    """On Gloo every end is that of the work, or a bound that says so; none is a mere launch."""
    for recorded in called:
        assert {s.source for s in recorded.spans("collective")} <= {0, 4}
        waits = {s.parent for s in recorded.spans("phase", "wait")}
        asynchronous = {s.number for s in recorded.spans("collective") if s.flags & 1}
        assert waits <= asynchronous


def test_results_are_those_of_the_untraced_program(called: list[Recorded], tmp_path: Path) -> None:
    """Every call computes the same to the bit, and the Flight Recorder sees the same calls."""
    run(tmp_path, (PROGRAMS / "calls.py").read_text(), 2, 0, TORCH_FR_BUFFER_SIZE="2000")
    for rank, recorded in enumerate(called):
        untraced = [json.loads(line) for line in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()]
        assert recorded.said == untraced
