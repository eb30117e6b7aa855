"""Sums and means of torch tensors over all processes of the job."""

import atexit
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from otel_dltrace.pushpull.compression import Compressor, Fp16, TopK
from otel_dltrace.pushpull.engine import Engine
from otel_dltrace.pushpull.errors import MismatchError, PushPullError
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import read_env
from otel_dltrace.pushpull.tasks import Operation
from otel_dltrace.pushpull.wire import DTYPES, Values

_PREFIX = "byteps."
_FORKED = "this process is a fork of one of the job's, which alone can push and pull: do it there"
_CARRIED_AS = {torch.bfloat16: torch.float32, torch.bool: torch.uint8, torch.int16: torch.int32}
"""Types that the servers do not know, and what their values travel as."""


class Compression:
    """How gradients are packed on their way to the servers and back."""

    none: Compressor | None = None
    fp16: Compressor | None = Fp16()
    topk = TopK


@dataclass(slots=True)
class _Pending:
    """A push_pull that nobody has waited for yet, and where its result goes if it is not in place."""

    name: str
    operation: Operation
    tensor: Tensor
    carrier: Tensor


@dataclass(slots=True)
class _Live:
    """What `init` made and `shutdown` clears."""

    engine: Engine | None = None
    pending: dict[int, _Pending] = field(default_factory=dict)
    handles: "itertools.count[int]" = field(default_factory=itertools.count)
    parameters: set[str] = field(default_factory=set)
    """The names of what all optimizers train."""
    left: set[tuple[str, str]] = field(default_factory=set)
    """Root and secret of the jobs whose servers we have said goodbye to."""
    parents: Engine | None = None
    """That of the process that we are a fork of. It is kept: closed, it would end that process's connections."""

    def forked(self) -> None:
        """Leave the engine to the parent, whose threads alone do its work: a push_pull here would wait in vain."""
        self.parents, self.engine = self.engine or self.parents, None

    @property
    def layout(self) -> Layout:
        """This process's place in the job, or that of the one it is a fork of, as a DataLoader's worker is."""
        return (self.engine or self.parents or engine()).layout


_live = _Live()
os.register_at_fork(after_in_child=_live.forked)


def init(env: Mapping[str, str] | None = None) -> None:
    """Meet the other processes of the job that the launcher's variables describe.

    Args:
        env: The variables; those of this process unless given.

    Raises:
        ConfigError: A variable that cannot be used.
        PeerLostError: Another process did not come within the timeout, or does not trust us.
        MismatchError: A server refuses us: our variables say other things of the job than its own or other workers'.
        PushPullError: We have shut down, and the job has servers: they let each worker in once.
    """
    if _live.engine is not None:
        return
    layout, options = read_env(os.environ if env is None else env)
    if _live.parents is not None and options.token and options.token == _live.parents.options.token:
        return  # a fork has its parent's place, and is told so when it pushes
    if layout.distributed and (options.root, options.token) in _live.left:
        raise PushPullError(
            "pushpull was shut down in this process, and its job has servers: those let a worker in only once"
        )
    made = Engine(layout, options)
    made.start()
    _live.engine = made
    atexit.register(shutdown)


def shutdown() -> None:
    """Say goodbye to the other processes; they may go on with what does not need us."""
    if _live.engine is not None:
        _live.engine.stop()
        _live.left.add((_live.engine.options.root, _live.engine.options.token))
        _live.engine = None
        _live.pending.clear()
        _live.parameters.clear()
        atexit.unregister(shutdown)


def rank() -> int:
    """Return this process's rank in the job."""
    return _live.layout.rank


def size() -> int:
    """Return how many training processes the job has."""
    return _live.layout.size


def local_rank() -> int:
    """Return this process's rank within its worker."""
    return _live.layout.local_rank


def local_size() -> int:
    """Return how many training processes the worker has."""
    return _live.layout.local_size


def declare(name: str, priority: int = 0, compression: Compressor | None = None) -> None:
    """Give the tensor *name* its key, priority and compression; all processes declare in the same order.

    Args:
        name: The name that it is pushed by.
        priority: Higher goes first, where BYTEPS_SCHEDULING_CREDIT is set.
        compression: One of `Compression`; used from BYTEPS_MIN_COMPRESS_BYTES on.
    """
    engine().declare(_PREFIX + name, priority, compression)


def push_pull_async_inplace(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,  # noqa: ARG001 - BytePS's; its sums do not depend on it either
    priority: int | None = None,
) -> int:
    """Begin to replace *tensor* by its mean or sum over all processes; return a handle for `synchronize`."""
    return start(tensor, tensor, average, name, priority)


def push_pull_async(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,  # noqa: ARG001 - as above
    priority: int | None = None,
) -> int:
    """Begin to compute the mean or sum of *tensor* over all processes; return a handle for `synchronize`."""
    output = copied(tensor)
    return start(output, output, average, name, priority)


def push_pull_inplace(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int | None = None
) -> Tensor:
    """Replace *tensor* by its mean or sum over all processes."""
    return synchronize(push_pull_async_inplace(tensor, average, name, version, priority))


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return or raise at once; asked for as long as that waits, it would.

    Of the time between two polls at most a second counts.
    """
    return engine().poll(_pending(handle).operation)


def synchronize(handle: int) -> Tensor:
    """Wait for the push_pull with *handle*; return its result.

    Raises:
        PushPullError: Another process died or left, or means something else by this name.
    """
    pending = _pending(handle)
    try:
        engine().wait(pending.operation)
    finally:  # not before: till then its name is taken
        _live.pending.pop(handle, None)
    if pending.carrier is not pending.tensor:
        pending.tensor.detach().copy_(pending.carrier)
    return pending.tensor


def engine() -> Engine:
    """Return what `init` made."""
    if _live.engine is None:
        if _live.parents is not None:
            raise PushPullError(_FORKED)
        raise PushPullError("pushpull is not running; call init() first")
    return _live.engine


def parameters() -> set[str]:
    """Return the names that parameters of optimizers have so far, for whoever gives another one."""
    return _live.parameters


def _pending(handle: int) -> _Pending:
    if handle not in _live.pending:
        raise PushPullError(f"handle {handle} is not of a push_pull under way; was it already synchronized?")
    return _live.pending[handle]


def start(
    tensor: Tensor,
    output: Tensor,
    average: bool,
    name: str | None,
    priority: int | None = None,
    initial: Tensor | None = None,
    compression: Compressor | None = None,
) -> int:
    """Begin a push_pull of *tensor* whose result is *output*; with *initial* an asynchronous one."""
    carrier = _carrier(tensor)
    name = name or unnamed(tensor)
    declared = engine().declare(_PREFIX + name)
    if priority is not None:
        declared.priority = priority
    if compression is not None:
        declared.compress(compression)
    first = None if initial is None else _flat(_carrier(initial))
    operation = engine().push_pull(declared, _flat(carrier), average=average, initial=first)
    handle = next(_live.handles)
    _live.pending[handle] = _Pending(name, operation, output, carrier)
    return handle


def gradient_name(name: str) -> str | None:
    """Return by which name gradients of the tensor *name* go if it is compressed, declared as that is; else None.

    What was left out of its values is no part of its gradients. Declared with the values, for all processes push those
    in one order, and some may have no gradients of them.
    """
    declared = engine().declare(_PREFIX + name)
    if declared.compressor is None:
        return None
    declare(f"{name}.grad", declared.priority, declared.compressor)
    return f"{name}.grad"


def unnamed(tensor: Tensor) -> str:
    """Return a name for *tensor*, which has none: its kind, or that and the first number which is free.

    A name is free once its push_pull was synchronized. That follows from the program's order alone, not from what is
    done by when: it is the same on all processes.
    """
    kind = f"noname.{_type(tensor.dtype)}.{tensor.numel()}"
    taken = {pending.name for pending in list(_live.pending.values())}
    name, number = kind, 0
    while name in taken:
        number += 1
        name = f"{kind}.{number}"
    return name


def copied(tensor: object) -> Tensor:
    """Return a copy of *tensor*, for the result of its push_pull."""
    return _checked(tensor).detach().clone()


def _checked(tensor: object) -> Tensor:
    """Return *tensor* if it has values that can be pushed, of whatever type."""
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise MismatchError(f"a value of type {kind} cannot be pushed; make it a tensor, as by torch.tensor(...)")
    if tensor.is_meta:
        raise MismatchError("a tensor on the device meta has no values that can be pushed; materialize it first")
    return tensor


def _carrier(tensor: Tensor) -> Tensor:
    """Return *tensor* if its memory can be read and written as it is, else a copy that can."""
    _checked(tensor)
    if tensor.layout is not torch.strided:
        raise MismatchError(f"a tensor of layout {tensor.layout} cannot be pushed; push what its to_dense() returns")
    dtype = _CARRIED_AS.get(tensor.dtype, tensor.dtype)
    if _type(dtype) not in DTYPES:
        known = ", ".join([*DTYPES, *map(_type, _CARRIED_AS)])
        raise MismatchError(f"a tensor of dtype {_type(tensor.dtype)} cannot be pushed; push it as one of {known}")
    if tensor.device.type == "cpu" and tensor.is_contiguous() and dtype == tensor.dtype:
        return tensor
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def _flat(tensor: Tensor) -> Values:
    return cast(Values, tensor.detach().view(-1).numpy())


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
