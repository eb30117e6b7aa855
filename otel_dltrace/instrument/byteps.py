"""BytePS's PyTorch plugin: each push_pull of a tensor, from its call until the program knows that it is done.

All of its calls (``push_pull``, its variants, `DistributedOptimizer`, `broadcast_parameters`) go through two private
functions, which return a handle, and end in ``synchronize``: so these are traced, and an operation is one span whoever
asked for it. What happens to its partitions is known to BytePS's C++ alone, which writes it to ``comm.json``.
"""

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from time import monotonic_ns
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._launcher import launcher_bind
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PHASE, PUSH_PULL, WAIT, Flag, Level, Source
from otel_dltrace.record.steps import Operation, Tracer, live

PLUGIN, OPS = "byteps.torch", "byteps.torch.ops"
BACKEND = "byteps"
PARAMETERS: dict[str, tuple[str, ...]] = {
    "_do_push_pull_async": ("tensor", "output", "average", "name"),
    "_do_push_pull_group_sync": ("tensor", "output", "average", "name"),
    "synchronize": ("handle",),
    "poll": ("handle",),
    "broadcast_parameters": ("params", "root_rank"),
}
"""The parameters that are read, in order, by function."""
PRECISE_NS = 50_000
"""An end that is known this well counts as known."""


def argument(function: str, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Return the argument *name* of a call of *function*."""
    position = PARAMETERS[function].index(name)
    return args[position] if position < len(args) else kwargs.get(name)


class _Local(threading.local):
    blocking = 0
    root = -1


@dataclass(slots=True)
class Pending:
    """A push_pull under way; *seen* is when it was last known not to be done."""

    operation: Operation
    seq: int
    seen: int = 0

    def found_done(self, now: int) -> None:
        """End it, which was found done at *now*."""
        source = Source.HOST_DONE if now - self.seen <= PRECISE_NS else Source.BOUND
        self.operation.close(self.seq, source, end=now)


Wait = tuple[Pending, int, bool]
"""What is waited for, since when, and whether it was done by then."""


class PushPulls:
    """The push_pulls of the process that *tracer* follows."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.local = _Local()
        self.pending: dict[int, Pending] = {}
        self._wait = tracer.recorder.intern(Descriptor(PHASE, WAIT))
        self._counts: dict[str, Iterator[int]] = {}
        self._descriptors: dict[tuple[str, Any], tuple[int, Iterator[int]]] = {}

    def begin(self, tensor: Any, name: str | None) -> Pending:
        """Return the push_pull of *tensor* that begins."""
        descriptor, numbers = self._descriptors.get((name or "", tensor.dtype)) or self._describe(name or "", tensor)
        local = self.local
        flags = 0 if local.blocking else Flag.ASYNC
        size = tensor.element_size() * tensor.nelement()
        return Pending(Operation(self.tracer.recorder, descriptor, size, b=local.root, flags=flags), next(numbers))

    def _describe(self, name: str, tensor: Any) -> tuple[int, Iterator[int]]:
        # As BytePS calls it in comm.json; without a name its handle is put there, which it always gives as 0.
        full = f"byteps.{name or 'noname.0'}"
        descriptor = Descriptor(
            COLLECTIVE,
            PUSH_PULL,
            group_size=_ops().size(),
            backend=BACKEND,
            tensor=full,
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        # setdefault: of two threads that come first together both must draw from one count.
        numbers = self._counts.setdefault(full, count(1))
        known = self._descriptors[name, tensor.dtype] = (self.tracer.recorder.intern(descriptor), numbers)
        return known

    def launched(self, handle: int, pending: Pending) -> None:
        """Know that *pending* is under way and has *handle*."""
        pending.seen = monotonic_ns()
        self.pending[handle] = pending

    def wait_begins(self, handle: int) -> Wait | None:
        """Return the wait for *handle* that begins; None where it is none of ours."""
        pending = self.pending.pop(handle, None)
        if pending is None or handle not in _ops()._handle_map:
            return None
        is_async = pending.operation.flags & Flag.ASYNC
        return pending, monotonic_ns(), bool(is_async and _bare_poll()(handle))

    def waited(self, wait: Wait, error: BaseException | None = None) -> None:
        """End what was waited for."""
        end = monotonic_ns()
        pending, start, was_done = wait
        operation = pending.operation
        if was_done and error is None:
            pending.found_done(start)
            return
        if operation.flags & Flag.ASYNC:
            self.tracer.recorder.phase(self._wait, start, end, parent=operation.number, step=operation.step)
        operation.close(pending.seq, error=error, end=end)

    def leave(self) -> None:
        """End what nobody has waited for, as issued: its end will not be known."""
        while self.pending:
            _, pending = self.pending.popitem()
            pending.operation.close(pending.seq, Source.HOST_ISSUE, end=pending.seen)


_push_pulls: PushPulls | None = None


def _here() -> PushPulls:
    global _push_pulls  # noqa: PLW0603  -- those of the live tracer
    tracer = live.tracer
    assert tracer is not None
    if _push_pulls is None or _push_pulls.tracer is not tracer:
        _push_pulls = PushPulls(tracer)
    return _push_pulls


def _ops() -> Any:
    return sys.modules[OPS]


def _bare_poll() -> Any:
    """Return ``poll`` without the site around it: what we ask is not what the program asks."""
    poll = _ops().poll
    return getattr(poll, "__wrapped__", poll)


# -- sites ------------------------------------------------------------------------------------------


def _begin_async(args: Args, kwargs: Kwargs) -> Pending:
    tensor, name = (argument("_do_push_pull_async", each, args, kwargs) for each in ("tensor", "name"))
    return _here().begin(tensor, name)


def _launched(pending: Pending, handle: int) -> None:
    _here().launched(handle, pending)


def _launched_in_group(pending: Pending, result: tuple[int, int]) -> None:
    _here().launched(result[0], pending)


def _refused(pending: Pending, error: BaseException) -> None:
    pending.operation.close(pending.seq, error=error)


def _wait_begins(args: Args, kwargs: Kwargs) -> Wait | None:
    return _here().wait_begins(argument("synchronize", "handle", args, kwargs))


def _waited(wait: Wait, _result: object) -> None:
    _here().waited(wait)


def _wait_failed(wait: Wait, error: BaseException) -> None:
    _here().waited(wait, error)


def _asked(args: Args, kwargs: Kwargs) -> Pending | None:
    return _here().pending.get(argument("poll", "handle", args, kwargs))


def _answered(pending: Pending, done: bool) -> None:
    now = monotonic_ns()
    if done:
        pending.found_done(now)  # a second one finds it closed
    else:
        pending.seen = now


def _blocking_begins(_args: Args, _kwargs: Kwargs) -> PushPulls:
    here = _here()
    here.local.blocking += 1
    return here


def _blocking_over(here: PushPulls, _result: object) -> None:
    here.local.blocking -= 1


def _broadcast_begins(args: Args, kwargs: Kwargs) -> PushPulls:
    here = _here()
    here.local.root = int(argument("broadcast_parameters", "root_rank", args, kwargs))
    return here


def _broadcast_over(here: PushPulls, _result: object) -> None:
    here.local.root = -1


def _yes(_args: Args, _kwargs: Kwargs) -> bool:
    return True


def _initialised(_span: object, _result: object) -> None:
    """Bind by the launcher's variables, where they name this run: BytePS has no store to agree through."""
    tracer = live.tracer
    assert tracer is not None
    bind = launcher_bind(tracer)
    if bind is not None:
        tracer.recorder.bind(bind)


def _attach(_module: ModuleType) -> Undo:
    def detach() -> None:
        if _push_pulls is not None:
            _push_pulls.leave()

    return detach


_LEVEL = Level.COLLECTIVE

ROWS: tuple[Row, ...] = (
    Site(OPS, "init", _yes, _initialised),
    Site(OPS, "_do_push_pull_async", _begin_async, _launched, _refused, _LEVEL),
    Site(OPS, "_do_push_pull_group_sync", _begin_async, _launched_in_group, _refused, _LEVEL),
    Site(OPS, "push_pull", _blocking_begins, _blocking_over, _blocking_over, _LEVEL),
    Site(OPS, "push_pull_inplace", _blocking_begins, _blocking_over, _blocking_over, _LEVEL),
    Site(OPS, "synchronize", _wait_begins, _waited, _wait_failed, _LEVEL),
    Site(OPS, "poll", _asked, _answered, level=_LEVEL),
    Site(PLUGIN, "broadcast_parameters", _broadcast_begins, _broadcast_over, _broadcast_over, _LEVEL),
    Attachment(OPS, _attach),
)
