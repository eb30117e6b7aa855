"""The gradient buckets of DistributedDataParallel, from what it records itself.

DDP's all-reduces run in C++ and pass through no Python function. Its reducer keeps, for each
parameter, when the gradient was ready, counted from `prepare_for_backward`, which the end of the
forward calls. A bucket is launched when its last gradient is ready and every earlier bucket has
been launched; so launch times cost one call per step. Their error is what lies between the start
of `prepare_for_backward` and its own clock read: less than the call takes, some microseconds.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site
from otel_dltrace.instrument._torch_groups import HOST_BACKENDS, backend_of, sequence_number
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, Flag, Level, Source
from otel_dltrace.record.steps import live


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: its parameters' indices, its bytes, its descriptor's number in this process."""

    parameters: tuple[int, ...]
    size: int
    descriptor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The buckets of one model in the order of their launch; *plain*: each is one all-reduce."""

    buckets: tuple[Bucket, ...]
    plain: bool
    source: int


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


_prepared_at = [0]
_prepared: "weakref.WeakKeyDictionary[Any, _Prepared]" = weakref.WeakKeyDictionary()
_unwritten: "weakref.WeakKeyDictionary[Any, _Synchronised]" = weakref.WeakKeyDictionary()
_layouts: "weakref.WeakKeyDictionary[Any, tuple[Any, bool, Layout]]" = weakref.WeakKeyDictionary()


def _prepare_begins(_args: Args, _kwargs: Kwargs) -> None:
    _prepared_at[0] = monotonic_ns()


def _post_forward_begins(args: Args, _kwargs: Kwargs) -> Any:
    _prepared_at[0] = 0
    return args[0]


def _post_forward_ended(model: Any, _output: object) -> None:
    if _prepared_at[0]:  # not in no_sync(), nor without gradients
        _prepared[model] = _Prepared(_prepared_at[0])


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
    for model, prepared, ready in synchronised:
        advance = sequence_number(model.process_group) - prepared.seq
        alone, step = len(synchronised) == 1, live.tracer.recorder.step
        rebuilt = bool(getattr(model, "_has_rebuilt_buckets", False))
        _write(model, _Synchronised(prepared.since, ready, prepared.seq, advance, alone, end, step, rebuilt))


def _write(model: Any, synchronised: _Synchronised) -> None:
    layout = _layout(model, len(synchronised.ready), synchronised.rebuilt)
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
    launch = backward.since
    for k, bucket in enumerate(layout.buckets):
        launch = max(launch, backward.since + max(backward.ready[i] for i in bucket.parameters))
        tracer.recorder.span(
            bucket.descriptor,
            Level.COLLECTIVE,
            launch,
            max(backward.end, launch),
            bucket.size,
            seq=backward.seq + k + 1 if certain else 0,
            b=-1,
            flags=Flag.ASYNC,
            source=layout.source,
            step=backward.step,
        )


def _layout(model: Any, count: int, rebuilt: bool) -> Layout | None:
    """Return the buckets of *model*, which has *count* parameters; None where they cannot be known."""
    recorder = live.tracer.recorder if live.tracer else None
    known = _layouts.get(model)
    if known is not None and known[:2] == (recorder, rebuilt):
        return known[2]
    texts = model.logger._get_ddp_logging_data().strs_map
    parameters = [p for p in model._module_parameters if p.requires_grad]
    sizes = numbers(texts.get("rebuilt_bucket_sizes" if rebuilt else "bucket_sizes", ""))
    if rebuilt:
        members = [numbers(part) for part in texts.get("rebuilt_per_bucket_param_indices", "").split(",")]
    else:
        members = initial_buckets(parameters, sizes)
    all_members = sorted(chain.from_iterable(members))
    if len(parameters) != count or len(sizes) != len(members) or all_members != list(range(count)):
        return None
    layout = _describe(model, parameters, list(zip(members, sizes, strict=True)), "comm_hook" not in texts)
    _layouts[model] = (recorder, rebuilt, layout)
    return layout


def _describe(model: Any, parameters: list[Any], buckets: list[tuple[list[int], int]], plain: bool) -> Layout:
    assert live.tracer is not None
    group = model.process_group
    backend = backend_of(group, parameters[0].device)
    described = []
    for k, (members, size) in enumerate(buckets):
        descriptor = Descriptor(
            COLLECTIVE,
            "all_reduce",
            group=group.group_name,
            group_size=group.size(),
            backend=backend,
            tensor=f"bucket {k}",
            dtype=str(parameters[members[0]].dtype).removeprefix("torch."),
        )
        described.append(Bucket(tuple(members), size, live.tracer.recorder.intern(descriptor)))
    # On a device the end of backward is no bound: the transfer may go on after it.
    source = Source.BOUND if backend in HOST_BACKENDS else Source.HOST_ISSUE
    return Layout(tuple(described), plain, source)


def initial_buckets(parameters: Sequence[Any], sizes: Sequence[int]) -> list[list[int]]:
    """Return the parameters of each bucket before DDP has rebuilt them; [] where that is not certain.

    Where all are of one type on one device, buckets are runs of parameters, the last first; the
    sizes that DDP reports must come out exactly.
    """
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        return []
    buckets: list[list[int]] = []
    left = list(range(len(parameters)))
    for size in sizes:
        bucket: list[int] = []
        room = size
        while left and room > 0:
            room -= parameters[left[-1]].nbytes
            bucket.append(left.pop())
        if room:
            return []
        buckets.append(bucket)
    return [] if left else buckets


def numbers(text: str) -> list[int]:
    """Return the whole numbers in *text*, which DDP separates by commas or blanks."""
    return [int(word) for word in text.replace(",", " ").split()]


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
)
