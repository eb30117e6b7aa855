"""BytePS's PyTorch plugin: each push_pull of a tensor, from its call until the program knows that it is done.

All of its calls (``push_pull``, its variants, `DistributedOptimizer`, `broadcast_parameters`) go through two private
functions, which return a handle, and end in ``synchronize``: so these are traced, and an operation is one span whoever
asked for it. What happens to its partitions is known to BytePS's C++ alone, which writes it to ``comm.json``.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from otel_dltrace.instrument._handle_sites import LEVEL, Calls, Plugin
from otel_dltrace.instrument._handles import ASYNC, Pending
from otel_dltrace.instrument._launcher import launcher_bind
from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site, always
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PUSH_PULL
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.tracer import Tracer, live

PLUGIN, OPS = "byteps.torch", "byteps.torch.ops"
BACKEND = "byteps"
PARAMETERS: dict[str, tuple[str, ...]] = {
    "_do_push_pull_async": ("tensor", "output", "average", "name"),
    "_do_push_pull_group_sync": ("tensor", "output", "average", "name"),
    "broadcast_parameters": ("params", "root_rank"),
}
"""The parameters that are read, in order, by function."""


def argument(function: str, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Return the argument *name* of a call of *function*."""
    position = PARAMETERS[function].index(name)
    return args[position] if position < len(args) else kwargs.get(name)


class _Broadcast(threading.local):
    root = -1


class _Pending(Pending):
    """A push_pull that takes its number of *numbers* once BytePS has taken it: one that it refuses is not counted."""

    def __init__(self, operation: Operation, numbers: Iterator[int]) -> None:
        super().__init__([operation], [0])
        self._next = numbers

    def is_taken(self) -> "_Pending":
        self.numbers = [next(self._next)]
        return self


class PushPulls(Calls):
    """The push_pulls of the process that *tracer* follows.

    Attributes:
        broadcast: From which rank this thread broadcasts, -1 for none: what it pushes then is part of that.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer, OPS)
        self.broadcast = _Broadcast()
        self._counts: dict[str, Iterator[int]] = {}
        self._descriptors: dict[tuple[str, Any], tuple[int, Iterator[int]]] = {}

    def begin(self, tensor: Any, name: str | None) -> _Pending:
        """Return the push_pull of *tensor* that begins."""
        descriptor, numbers = self._descriptors.get((name or "", tensor.dtype)) or self._describe(name or "", tensor)
        flags = 0 if self.local.blocking else ASYNC
        size, root = tensor.element_size() * tensor.nelement(), self.broadcast.root
        return _Pending(Operation(self.tracer.recorder, descriptor, size, b=root, flags=flags), numbers)

    def _describe(self, name: str, tensor: Any) -> tuple[int, Iterator[int]]:
        # As BytePS calls it in comm.json; without a name its handle is put there, which it always gives as 0.
        full = f"byteps.{name or 'noname.0'}"
        descriptor = Descriptor(
            COLLECTIVE,
            PUSH_PULL,
            group_size=sys.modules[OPS].size(),
            backend=BACKEND,
            tensor=full,
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        # setdefault: of two threads that come first together both must draw from one count.
        numbers = self._counts.setdefault(full, count(1))
        known = self._descriptors[name, tensor.dtype] = (self.tracer.recorder.intern(descriptor), numbers)
        return known


_plugin = Plugin(OPS, PushPulls)


# -- sites ------------------------------------------------------------------------------------------


def _begin_async(args: Args, kwargs: Kwargs) -> _Pending:
    tensor, name = (argument("_do_push_pull_async", each, args, kwargs) for each in ("tensor", "name"))
    return _plugin.here().begin(tensor, name)


def _launched(pending: _Pending, handle: int) -> None:
    _plugin.here().handles.launched(handle, pending.is_taken())


def _launched_in_group(pending: _Pending, result: tuple[int, int]) -> None:
    _plugin.here().handles.launched(result[0], pending.is_taken())


def _refused(pending: Pending, error: BaseException) -> None:
    pending.close(error=error)


def _broadcast_begins(args: Args, kwargs: Kwargs) -> PushPulls:
    here = _plugin.here()
    here.broadcast.root = int(argument("broadcast_parameters", "root_rank", args, kwargs))
    return here


def _broadcast_over(here: PushPulls, _result: object) -> None:
    here.broadcast.root = -1


def _initialised(_span: object, _result: object) -> None:
    """Bind by the launcher's variables, where they name this run: BytePS has no store to agree through.

    Where its timeline is asked for, see to it that it can be written.
    """
    tracer = live.tracer
    assert tracer is not None
    bind = launcher_bind(tracer)
    if bind is not None:
        tracer.recorder.bind(bind)
    _make_folder((tracer.recorder.home.get("at_end") or {}).get("worker", ""))


def _make_folder(traces: str) -> None:
    """Make the folder below *traces* that BytePS writes its timeline to: it makes none, and loses what it cannot write.

    Its launcher makes one, but elsewhere unless BYTEPS_TRACE_DIR is set.
    """
    if traces:
        with suppress(OSError):  # at the end it is said that there is none
            Path(traces, str(sys.modules[OPS].local_rank())).mkdir(parents=True, exist_ok=True)


ROWS: tuple[Row, ...] = (
    Site(OPS, "init", always, _initialised),
    Site(OPS, "_do_push_pull_async", _begin_async, _launched, _refused, LEVEL),
    Site(OPS, "_do_push_pull_group_sync", _begin_async, _launched_in_group, _refused, LEVEL),
    Site(PLUGIN, "broadcast_parameters", _broadcast_begins, _broadcast_over, _broadcast_over, LEVEL),
    *_plugin.rows(("push_pull", "push_pull_inplace")),
)
