"""The operations of a process that uses Horovod: how they are described, numbered and ended."""

import sys
from collections import Counter
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._handle_sites import Calls
from otel_dltrace.instrument._handles import ASYNC, Pending
from otel_dltrace.instrument._horovod.calls import OPS, Call
from otel_dltrace.model.activities import BACKEND
from otel_dltrace.model.operation import MAX_DESCRIPTORS, Descriptor
from otel_dltrace.model.semconv import COLLECTIVE
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.tracer import Tracer

GLOBAL_SET = 0
_JOIN_SHIFT = 20


class Series:
    """The operations of one tensor in one process set, numbered alike on all its ranks."""

    __slots__ = ("last",)

    def __init__(self, last: int) -> None:
        self.last = last

    def number(self) -> int:
        """Return the number of the next one, from 1; Horovod has but one of a tensor under way at a time."""
        self.last += 1
        return self.last


MOST_NAMED = MAX_DESCRIPTORS // 2
"""Calls that are told apart by name; further names, of a program that makes new ones in every step, count as none."""


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of all calls with the same arguments.

    Attributes:
        tensors: Descriptor and series of each tensor; without a series, the handle is the number.
        is_global: Whether all ranks take part.
    """

    tensors: list[tuple[int, Series | None]]
    is_global: bool


class Operations(Calls):
    """The operations of the process that *tracer* follows.

    Attributes:
        last: How many operations of all ranks there have been; after a `joined`, from a number that all have in common.
        starts: How often Horovod was initialised.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer, OPS)
        self.last = self.starts = 0
        self.follows_timeline = False
        self._described: dict[tuple[Any, ...], Described] = {}
        self._series: dict[tuple[str, str], Series] = {}
        self._joins = 0
        self._removed: Counter[int] = Counter()
        self._first = 0

    # -- calls --------------------------------------------------------------------------------------

    def begin(self, call: Call, args: tuple[Any, ...]) -> tuple[Pending, Described]:
        """Return the operation that begins, one for each tensor; what numbers them is known once it has a handle."""
        start = monotonic_ns()
        tensors, name, process_set = call.get(args)
        tensors = tensors if call.is_grouped else (tensors,)
        is_adasum = call.op >= 0 and args[call.op] == _ops().Adasum
        key = (call.prefix, name, process_set.process_set_id, is_adasum, *[tensor.dtype for tensor in tensors])
        described = self._described.get(key)
        if described is None:
            described = self._first_seen(call, key, process_set, tensors)
        flags = 0 if self.local.blocking else ASYNC
        root = args[call.root] if call.root >= 0 else -1
        recorder = self.tracer.recorder
        operations = [
            Operation(recorder, descriptor, tensor.element_size() * tensor.nelement(), b=root, flags=flags)
            for (descriptor, _), tensor in zip(described.tensors, tensors, strict=True)
        ]
        for one in operations:
            one.start = start
        return Pending(operations, [0] * len(operations)), described

    def launched(self, pending: Pending, described: Described, handle: int) -> None:
        """Know that what began is under way: the same calls have succeeded on all ranks, so they number alike."""
        pending.numbers = [handle if series is None else series.number() for _, series in described.tensors]
        if described.is_global:
            self.last += len(described.tensors)
        self.handles.launched(handle, pending)

    def begin_plain(self, name: str, process_set: Any = None) -> tuple[Operation, Series]:
        """Return a blocking operation that is on no tensor."""
        number = getattr(process_set, "process_set_id", GLOBAL_SET)
        described = self._described.get((name, number))
        if described is None:
            one = self._one(name, f"{name}.noname", process_set, "")
            described = self._described[name, number] = Described([one], number == GLOBAL_SET)
        ((descriptor, series),) = described.tensors
        assert series is not None
        return Operation(self.tracer.recorder, descriptor), series

    # -- names --------------------------------------------------------------------------------------

    def _first_seen(self, call: Call, key: tuple[Any, ...], process_set: Any, tensors: tuple[Any, ...]) -> Described:
        prefix, name, number, is_adasum, *dtypes = key
        if len(self._described) >= MOST_NAMED:
            name = None
        key = (prefix, name, number, is_adasum, *dtypes)
        described = self._described.get(key)
        if described is None:
            operation = "adasum" if is_adasum else call.operation
            described = self._described[key] = self._describe(call, operation, name, process_set, tensors)
        return described

    def _describe(
        self, call: Call, operation: str, name: str | None, process_set: Any, tensors: tuple[Any, ...]
    ) -> Described:
        # Unnamed ones are numbered by their handle, which grows without end; it is the same on all ranks.
        full = f"{call.prefix}.{name or 'noname.N'}"
        members = [f"_{i}of{len(tensors)}" for i in range(1, len(tensors) + 1)] if call.is_grouped else [""]
        described = [
            self._one(operation, full + member, process_set, str(tensor.dtype).removeprefix("torch."))
            for member, tensor in zip(members, tensors, strict=True)
        ]
        numbered = [(descriptor, series if name else None) for descriptor, series in described]
        return Described(numbered, process_set.process_set_id == GLOBAL_SET)

    def _one(self, operation: str, tensor: str, process_set: Any, dtype: str) -> tuple[int, Series]:
        number = getattr(process_set, "process_set_id", GLOBAL_SET)
        size = _ops().size() if number == GLOBAL_SET else process_set.size()
        group = self.group_of(number)
        descriptor = Descriptor(
            COLLECTIVE, operation, group=group, group_size=size or 0, backend=BACKEND, tensor=tensor, dtype=dtype
        )
        key = (group, descriptor.normal().tensor)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series(self._joins << _JOIN_SHIFT)
        return self.tracer.recorder.intern(descriptor), series

    def group_of(self, number: int) -> str:
        """Return the id of the process set *number*: Horovod gives the number of a removed one to another."""
        removed = self._removed[number]
        own = f"{number}.{removed}" if removed else str(number)
        return f"{own}@{self._first}" if self._first else own

    def removed(self, number: int) -> None:
        """Know that the process set *number* is no more."""
        group = self.group_of(number)
        self._series = {key: value for key, value in self._series.items() if key[0] != group}
        self._removed[number] += 1
        self._described = {key: value for key, value in self._described.items() if number not in key[1:3]}

    def joined(self) -> None:
        """Number anew: a rank that joined early was in fewer operations than the others, and all know of the join."""
        self._joins += 1
        self.last = self._joins << _JOIN_SHIFT
        for series in self._series.values():
            series.last = self.last

    # -- the beginning and the end -------------------------------------------------------------------

    def initialised(self, first: int) -> None:
        """Forget what was numbered: Horovod begins anew, maybe with other ranks; its 0 is the launcher's *first*."""
        self.starts += 1
        self._first = first
        self.last = self._joins = 0
        self._described.clear()
        self._series.clear()
        self._removed.clear()


def _ops() -> Any:
    return sys.modules[OPS]
