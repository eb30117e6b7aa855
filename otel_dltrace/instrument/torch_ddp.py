"""The gradient buckets of DistributedDataParallel, from what it records itself.

DDP's all-reduces run in C++ and pass through no Python function. Its reducer keeps, for each
parameter, when the gradient was ready, counted from `prepare_for_backward`, which the end of the
forward calls. A bucket is launched when its last gradient is ready and every earlier bucket has
been launched; so launch times cost one call per step. Their error is what lies between the start
of `prepare_for_backward` and its own clock read: less than the call takes, some microseconds.
Ends are not known this way, only that they lie before the end of backward; at the level
``partition`` a hook sees them (`_torch_hooks`).
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument import _torch_hook, _torch_hooks
from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site
from otel_dltrace.instrument._torch_buckets import Layout, layout_of
from otel_dltrace.instrument._torch_groups import sequence_number
from otel_dltrace.instrument._torch_recorder import recorded_of
from otel_dltrace.model.semconv import Flag, Level, Source
from otel_dltrace.record.device import Mark
from otel_dltrace.record.steps import live


@dataclass(slots=True)
class _Prepared:
    """A model whose next backward synchronises: when its reducer began to count, what it knew before."""

    since: int
    ready: Sequence[int] = ()
    seq: int = 0


@dataclass(frozen=True, slots=True)
class _Synchronised:
    """A backward that has synchronised one model's gradients: what is needed to write its buckets."""

    since: int
    ready: Sequence[int]
    seq: int
    advance: int
    alone: bool
    end: int
    step: int
    rebuilt: bool
    over: Mark | None


_prepared_at = [0]
_prepared: "weakref.WeakKeyDictionary[Any, _Prepared]" = weakref.WeakKeyDictionary()
_unwritten: "weakref.WeakKeyDictionary[Any, _Synchronised]" = weakref.WeakKeyDictionary()


def _prepare_begins(_args: Args, _kwargs: Kwargs) -> None:
    _prepared_at[0] = monotonic_ns()


def _post_forward_begins(args: Args, _kwargs: Kwargs) -> Any:
    _prepared_at[0] = 0
    return args[0]


def _post_forward_ended(model: Any, _output: object) -> None:
    assert live.tracer is not None
    recorded_of(live.tracer).look()
    if _prepared_at[0]:  # not in no_sync(), nor without gradients
        _prepared[model] = _Prepared(_prepared_at[0])
        if live.tracer.recorder.level >= Level.PARTITION:
            _torch_hooks.meet(model)


def _backward_begins(_args: Args, _kwargs: Kwargs) -> list[tuple[Any, _Prepared]] | None:
    if not _prepared:
        return None
    models = list(_prepared.items())
    for model, prepared in models:
        prepared.ready = model.reducer.get_backward_stats()
        prepared.seq = sequence_number(model.process_group)
    return models


def _backward_ended(models: list[tuple[Any, _Prepared]], _result: object) -> None:
    end = monotonic_ns()
    assert live.tracer is not None
    synchronised = []
    for model, prepared in models:
        ready = model.reducer.get_backward_stats()
        if ready != prepared.ready:  # else the loss did not come from this model: it is still to come
            synchronised.append((model, prepared, ready))
            _prepared.pop(model, None)
    _torch_hook.flush()
    # The device goes on behind it when all buckets are reduced.
    over = live.tracer.steps.mark_operation() if recorded_of(live.tracer).is_on() else None
    for model, prepared, ready in synchronised:
        if _torch_hooks.recorded(model):
            continue
        advance = sequence_number(model.process_group) - prepared.seq
        alone, step = len(synchronised) == 1, live.tracer.recorder.step
        rebuilt = bool(getattr(model, "_has_rebuilt_buckets", False))
        _write(model, _Synchronised(prepared.since, ready, prepared.seq, advance, alone, end, step, rebuilt, over))


def _write(model: Any, synchronised: _Synchronised) -> None:
    layout = layout_of(model, len(synchronised.ready), synchronised.rebuilt)
    late = _unwritten.pop(model, None)
    if layout is None:
        # DDP says how it has rebuilt its buckets one step after it has.
        _unwritten[model] = synchronised
        return
    if late is not None and late.rebuilt == synchronised.rebuilt:
        _record(layout, late)
    _record(layout, synchronised)


def _record(layout: Layout, backward: _Synchronised) -> None:
    tracer = live.tracer
    assert tracer is not None
    # A second model, a user's own collective or a hook's breaks the count: no number, then.
    certain = layout.plain and backward.alone and backward.advance == len(layout.buckets)
    is_issued = layout.source == Source.HOST_ISSUE
    launch = backward.since
    for k, bucket in enumerate(layout.buckets):
        launch = max(launch, backward.since + max(backward.ready[i] for i in bucket.parameters))
        seq, number = backward.seq + k + 1 if certain else 0, tracer.recorder.number()
        is_followed = is_issued and recorded_of(tracer).follows(
            layout.group, seq, number, backward.step, launch, backward.over, is_end=True
        )
        tracer.recorder.span(
            bucket.descriptor,
            Level.COLLECTIVE,
            launch,
            max(backward.end, launch),
            bucket.size,
            seq=seq,
            b=-1,
            flags=Flag.ASYNC | Flag.DEVICE if is_followed else Flag.ASYNC,
            source=layout.source,
            number=number,
            step=backward.step,
        )


ROWS: tuple[Row, ...] = (
    Site("torch.distributed", "Reducer.prepare_for_backward", begin=_prepare_begins, level=Level.COLLECTIVE),
    Site(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel._post_forward",
        begin=_post_forward_begins,
        finish=_post_forward_ended,
        level=Level.COLLECTIVE,
    ),
    Site(
        "torch.autograd",
        "backward",
        begin=_backward_begins,
        finish=_backward_ended,
        level=Level.COLLECTIVE,
    ),
    *_torch_hooks.ROWS,
)
