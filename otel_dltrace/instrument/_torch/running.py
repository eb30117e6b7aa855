"""Calls under way: their spans, from their arguments to their end, or to the work that goes on."""

import sys
from contextlib import suppress
from time import monotonic_ns
from typing import Any, Protocol

from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.instrument._torch.calls import OPERATORS, Call, is_tensor, tensors_in
from otel_dltrace.instrument._torch.comm import Comm
from otel_dltrace.instrument._torch.groups import c10d, has_rank_0, is_outside, name_of, sequence_number
from otel_dltrace.instrument._torch.p2p import ANY, Ends, ends_of, rank_in_world
from otel_dltrace.instrument._torch.pending import Pending
from otel_dltrace.model.semconv import P2P, Flag, Source
from otel_dltrace.record.operation import Operation

_SENT_BY_ROOT = {"broadcast", "broadcast_coalesced", "broadcast_object_list", "scatter", "scatter_object_list"}


class Span(Protocol):
    """A call under way."""

    def finish(self, result: Any) -> None:
        """Know that the call has returned *result*."""

    def fail(self, error: BaseException) -> None:
        """Know that the call has raised *error*."""


class Running:
    """An operation inside its call."""

    __slots__ = (
        "_comm",
        "_is_counted",
        "call",
        "ends",
        "group",
        "inner",
        "mark",
        "operation",
        "seq",
        "source",
        "until",
        "waits",
    )

    def __init__(self, comm: Comm, call: Call, group: Any, args: Args, kwargs: Kwargs) -> None:
        self._comm, self.call, self.group = comm, call, group
        self.inner = False
        self.seq = self.until = 0
        ranks = 1 if group is None else group.size()
        value = call.argument(call.tensors, args, kwargs) if call.tensors else None
        size = call.size(value, ranks) if call.tensors else 0
        tensor = value if is_tensor(value) else next(tensors_in(value), None)
        asked = None if call.tensors else _asked_device(call, group, args, kwargs)
        descriptor, self.source, self._is_counted = comm.describe(call, group, tensor, asked)
        self.waits = _is_asynchronous(call, args, kwargs)
        self.ends: Ends | None = None
        a, b = 0, -1
        if call.kind == P2P and group is not None:
            self.ends = ends_of(call, group, args, kwargs)
            a, b = self.ends.peer, self.ends.tag
        elif group is not None:
            b = _root(call, group, args, kwargs)
        flags = int(Flag.ASYNC) if self.waits else 0
        self.mark = comm.tracer.steps.mark_operation() if self.source == Source.HOST_ISSUE else None
        self.operation = Operation(comm.tracer.recorder, descriptor, size, a, b, flags)

    def part(self, call: Call, args: Args, kwargs: Kwargs) -> "_Part | None":
        """Return the part of this operation that a *call* inside it is; None for a call inside that one."""
        if self.inner:
            return None
        self.inner = True
        return _Part(self, self._comm, call, args, kwargs)

    def finish(self, result: Any) -> None:
        """End it, or follow its work."""
        comm = self._comm
        comm.local.running = None
        if self.ends is not None:
            self._number_message(result)
        elif self._is_counted:
            self.seq = sequence_number(self.group)
        self._follow(result)
        comm.works.flush()
        if comm.binding.is_asking and self._is_over_with_rank_0():
            comm.binding.met()

    def _is_over_with_rank_0(self) -> bool:
        # A collective without a root ends on no rank before every rank of its group has begun it; what rank 0 sends
        # to all ends on none before that has, where its end is seen.
        root = self.operation.b
        is_sent = root == 0 and self.call.span in _SENT_BY_ROOT and self.source != Source.HOST_ISSUE
        shows = root < 0 or is_sent
        return shows and self.call.kind != P2P and not self.waits and has_rank_0(self.group)

    def _number_message(self, result: Any) -> None:
        """Number the message between the ends, where both are known by now."""
        assert self.ends is not None
        ends, call = self.ends, self.call
        if ends.peer == ANY and isinstance(result, int):
            ends = self.ends = Ends(ends.group, result, ends.tag, ends.sends)
            self.operation.a = result
        if not call.parts and ends.peer != ANY:
            self.seq = self._comm.messages.number(ends)

    def _follow(self, result: Any) -> None:
        works, module = self._comm.works, c10d()
        if isinstance(result, module.Work):
            known = self.ends is None or self.ends.peer != ANY
            settle = None if known else self._take_source
            pending = Pending(self.operation, self.seq, self.source, pollable=self.ends is None, settle=settle)
            pending.mark = self.mark
            self._expect()
            works.launched(result, pending, self.group)
        elif self.call.is_operator:
            self._expect()
            tensors = list(tensors_in(result))
            works.launched_tensor(tensors, Pending(self.operation, self.seq, self.source, pollable=False))
        elif self.waits and result is not None:
            works.launched_future(result, Pending(self.operation, self.seq, self.source), self.group)
        elif self.source == Source.HOST_ISSUE and self.group in module._world.pg_coalesce_state:
            pending = Pending(self.operation, self.seq, self.source, pollable=False)
            pending.mark = self.mark
            works.launched_in_block(pending, self.group)
        else:
            device, operation = self._comm.tracer.steps.device, self.operation
            if device and self.mark and device.operation(operation.number, operation.step, self.mark):
                operation.flags |= Flag.DEVICE
            operation.close(self.seq, self.source, end=self.until)

    def _expect(self) -> None:
        """Have the Flight Recorder tell of it, whose end nobody may wait for."""
        recorded, of = self._comm.recorded, self.operation
        if self.source != Source.HOST_ISSUE or self.call.kind == P2P or self.group is None or not recorded.is_on():
            return
        recorded.look()
        if recorded.follows(name_of(self.group), self.seq, of.number, of.step, of.start, self.mark):
            of.flags |= Flag.DEVICE

    def _take_source(self, pending: Pending, work: Any) -> None:
        """Learn from *work*, which is done, who has sent."""
        assert self.ends is not None
        with suppress(RuntimeError):
            peer = rank_in_world(self.group, work._source_rank())
            ends = Ends(self.ends.group, peer, self.ends.tag, self.ends.sends)
            self.operation.a, pending.seq = peer, self._comm.messages.number(ends)

    def fail(self, error: BaseException) -> None:
        """End it with *error*."""
        self._comm.local.running = None
        self.operation.close(source=self.source, error=error)


class _Batch:
    """Several operations inside one call, which returns a list."""

    __slots__ = ("_all",)

    def __init__(self, all_of_them: list[Running]) -> None:
        self._all = all_of_them

    def finish(self, result: Any) -> None:
        """Follow each of them."""
        for running, tensor in zip(self._all, result, strict=True):
            running.finish(tensor)

    def fail(self, error: BaseException) -> None:
        """End each of them with *error*."""
        for running in self._all:
            running.fail(error)


class _Part:
    """A call inside an operation that is made of several.

    That lasts from the first one's begin to the last one's end: the objects that it moves are pickled before, and made
    anew behind, and for neither a rank waits.
    """

    __slots__ = ("_call", "_comm", "_ends", "_outer")

    def __init__(self, outer: Running, comm: Comm, call: Call, args: Args, kwargs: Kwargs) -> None:
        self._outer, self._comm, self._call = outer, comm, call
        if not outer.until:
            outer.operation.start = monotonic_ns()
        group = outer.group
        value = call.argument(call.tensors, args, kwargs) if call.tensors else None
        outer.operation.size += call.size(value, group.size()) if call.tensors else 0
        self._ends = ends_of(call, group, args, kwargs) if call.kind == P2P else None

    def finish(self, result: Any) -> None:
        """Give the operation the number of its last part."""
        self._outer.inner, self._outer.until = False, monotonic_ns()
        ends = self._ends
        if ends is None:
            return
        if ends.peer == ANY and isinstance(result, int):
            ends = Ends(ends.group, result, ends.tag, ends.sends)
        if ends.peer != ANY:
            self._outer.seq = self._comm.messages.number(ends)

    def fail(self, _error: BaseException) -> None:
        """Leave the error to the operation."""
        self._outer.inner = False


def _is_asynchronous(call: Call, args: Args, kwargs: Kwargs) -> bool:
    if "async_op" in call.positions:
        return bool(call.argument("async_op", args, kwargs))
    if call.is_operator or call.kind == P2P:
        return call.is_operator or call.is_method
    options = call.argument("opts", args, kwargs)
    return "opts" in call.positions and bool(getattr(options, "asyncOp", True))


def _asked_device(call: Call, group: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the device on which a *call* without tensors has its own; None: the CPU, where its group has that."""
    if call.span != "barrier":
        return call.argument("device", args, kwargs) or None
    if call.is_method:
        asked = getattr(call.argument("opts", args, kwargs), "device", None)
        return asked or ("cuda" if group.name() == "nccl" else None)
    if isinstance(call.argument("device_ids", args, kwargs), list):
        return sys.modules["torch"]._C._get_accelerator()
    return getattr(group, "bound_device_id", None)


def _root(call: Call, group: Any, args: Args, kwargs: Kwargs) -> int:
    """Return the root's rank in the world, -1 where the operation has none."""
    in_group = None
    if call.options:
        options = call.argument(call.options, args, kwargs)
        in_group = getattr(options, "rootRank", options)
    elif call.root is not None:
        in_world, in_group = (call.argument(name, args, kwargs) for name in call.root)
        if in_world is not None:
            return int(in_world)
        if in_group is None and call.root[0]:
            return 0
    else:
        return -1
    return rank_in_world(group, int(in_group or 0))


def begin_call(comm: Comm, call: Call, args: Args, kwargs: Kwargs) -> Span | None:
    """Return the span of a *call*; None where it is none of its own."""
    outer: Running | None = comm.local.running
    # A Ctrl-C between the call and our note of its end leaves one that is not running: its step passes. A call of
    # another thread, which saves checkpoints, may last while the steps go on.
    if outer is not None and (outer.operation.step == comm.tracer.recorder.step or not comm.tracer.steps.trains_here()):
        # Inside another call (a deprecated name, a method) it is the same operation.
        return outer.part(call, args, kwargs) if outer.call.parts and outer.group is not None else None
    named = call.argument(call.group, args, kwargs)
    if is_outside(named):
        return None
    group = comm.group_of(named)
    if call.coalesces and group in c10d()._world.pg_coalesce_state:
        return None
    running = comm.local.running = Running(comm, call, group, args, kwargs)
    return running


def begin_batch(comm: Comm, names: Any, peers: Any, tags: Any, tensors: Any, group: Any) -> Span:
    """Return the spans of a compiled ``batch_isend_irecv``: one for each of its messages."""
    rows = {call.span: call for call in OPERATORS if call.kind == P2P}
    messages = zip(names, peers, tags, tensors, strict=True)
    here = comm.group_of(group)
    return _Batch(
        [Running(comm, rows[name], here, (tensor, peer, tag, group), {}) for name, peer, tag, tensor in messages]
    )
