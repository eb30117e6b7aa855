"""BytePS's PyTorch plugin: each push_pull of a tensor, from its call until the program knows that it is done.

All of its calls (``push_pull``, its variants, `DistributedOptimizer`, `broadcast_parameters`) go through two private
functions, which return a handle, and end in ``synchronize``: so these are traced, and an operation is one span whoever
asked for it. What happens to its partitions is known to BytePS's C++ alone, which writes it to ``comm.json``.
"""

import sys
import threading
from collections.abc import Iterator
from itertools import count
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._handles import ASYNC, Handles, Pending, Wait, asked_done
from otel_dltrace.instrument._launcher import launcher_bind
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PUSH_PULL, Level
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


def argument(function: str, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Return the argument *name* of a call of *function*."""
    position = PARAMETERS[function].index(name)
    return args[position] if position < len(args) else kwargs.get(name)


class _Local(threading.local):
    blocking = 0
    root = -1


class PushPulls:
    """The push_pulls of the process that *tracer* follows."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.local = _Local()
        self.handles = Handles(tracer, _is_done)
        self._counts: dict[str, Iterator[int]] = {}
        self._descriptors: dict[tuple[str, Any], tuple[int, Iterator[int]]] = {}

    def begin(self, tensor: Any, name: str | None) -> Pending:
        """Return the push_pull of *tensor* that begins."""
        descriptor, numbers = self._descriptors.get((name or "", tensor.dtype)) or self._describe(name or "", tensor)
        local = self.local
        flags = 0 if local.blocking else ASYNC
        size = tensor.element_size() * tensor.nelement()
        return Pending([Operation(self.tracer.recorder, descriptor, size, b=local.root, flags=flags)], [next(numbers)])

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


def _is_done(handle: int) -> bool:
    """Return whether what has *handle* is done, past the site around ``poll``: it is not the program that asks."""
    ops = _ops()
    return handle not in ops._handle_map or bool(getattr(ops.poll, "__wrapped__", ops.poll)(handle))


# -- sites ------------------------------------------------------------------------------------------


def _begin_async(args: Args, kwargs: Kwargs) -> Pending:
    tensor, name = (argument("_do_push_pull_async", each, args, kwargs) for each in ("tensor", "name"))
    return _here().begin(tensor, name)


def _launched(pending: Pending, handle: int) -> None:
    _here().handles.launched(handle, pending)


def _launched_in_group(pending: Pending, result: tuple[int, int]) -> None:
    _here().handles.launched(result[0], pending)


def _refused(pending: Pending, error: BaseException) -> None:
    pending.close(error=error)


def _wait_begins(args: Args, kwargs: Kwargs) -> Wait | None:
    return _here().handles.wait_begins(argument("synchronize", "handle", args, kwargs))


def _waited(wait: Wait, _result: object) -> None:
    _here().handles.waited(wait)


def _wait_failed(wait: Wait, error: BaseException) -> None:
    _here().handles.waited(wait, error)


def _asked(args: Args, kwargs: Kwargs) -> Pending | None:
    return _here().handles.pending.get(argument("poll", "handle", args, kwargs))


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
            _push_pulls.handles.leave()

    return detach


_LEVEL = Level.COLLECTIVE

ROWS: tuple[Row, ...] = (
    Site(OPS, "init", _yes, _initialised),
    Site(OPS, "_do_push_pull_async", _begin_async, _launched, _refused, _LEVEL),
    Site(OPS, "_do_push_pull_group_sync", _begin_async, _launched_in_group, _refused, _LEVEL),
    Site(OPS, "push_pull", _blocking_begins, _blocking_over, _blocking_over, _LEVEL),
    Site(OPS, "push_pull_inplace", _blocking_begins, _blocking_over, _blocking_over, _LEVEL),
    Site(OPS, "synchronize", _wait_begins, _waited, _wait_failed, _LEVEL),
    Site(OPS, "poll", _asked, asked_done, level=_LEVEL),
    Site(PLUGIN, "broadcast_parameters", _broadcast_begins, _broadcast_over, _broadcast_over, _LEVEL),
    Attachment(OPS, _attach),
)
