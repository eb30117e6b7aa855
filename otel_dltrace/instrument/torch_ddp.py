"""The gradient buckets of DistributedDataParallel, from what it records itself.

DDP's all-reduces run in C++ and pass through no Python function. Its reducer keeps, for each
parameter, when the gradient was ready, counted from `prepare_for_backward`, which the end of the
forward calls. A bucket is launched when its last gradient is ready and every earlier bucket has
been launched; so launch times cost one call per step. Their error is what lies between the start
of `prepare_for_backward` and its own clock read: less than the call takes, some microseconds.
Ends are not known this way, only that they lie before the end of backward; at the level
``partition`` a hook sees them (`_torch.hooks`).
In the first backward of a static graph the reducer keeps no times: at its end it copies all
gradients and launches all buckets, in one call from Python. That begins before the first launch.
"""

from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site
from otel_dltrace.instrument._torch import buckets, hook, hooks
from otel_dltrace.instrument._torch.backwards import Backward, Seen
from otel_dltrace.instrument._torch.buckets import Layout, layout_of
from otel_dltrace.instrument._torch.groups import sequence_number
from otel_dltrace.instrument._torch.recorder import recorded_of
from otel_dltrace.instrument._torch.root_hooks import graph_task
from otel_dltrace.model.semconv import Flag, Level, Source
from otel_dltrace.record.tracer import Tracer, live

# Plain ints: members of an enum cost microseconds, where Python's code is cold.
_COLLECTIVE, _PARTITION = int(Level.COLLECTIVE), int(Level.PARTITION)
_ASYNC, _ASYNC_ON_DEVICE = int(Flag.ASYNC), int(Flag.ASYNC | Flag.DEVICE)
_HOST_ISSUE = int(Source.HOST_ISSUE)


_seen = Seen()


def _prepare_begins(_args: Args, _kwargs: Kwargs) -> None:
    _seen.prepared_at = monotonic_ns()


def _post_forward_begins(args: Args, _kwargs: Kwargs) -> Any:
    _seen.prepared_at = 0
    return args[0]


def _post_forward_ended(model: Any, _output: object) -> None:
    tracer, seen = live.tracer, _seen
    assert tracer is not None
    if tracer.steps.device is not None:
        recorded_of(tracer).look()
    if seen.prepared_at:  # not in no_sync(), nor without gradients
        known = seen.latest
        if known is None or known.model() is not model:
            known = seen.model(model)
        if seen.prepared:
            seen.prepared = [one for one in seen.prepared if one.of is not known and one.of.model() is not None]
        # Here, where the reducer has just been busy, it costs less than where the backward begins.
        seen.prepared.append(Backward(known, seen.prepared_at, vars(model)["reducer"].get_backward_stats()))
        if tracer.recorder.level >= _PARTITION:
            hooks.meet(model)


def _backward_begins(_args: Args, _kwargs: Kwargs) -> list[Backward] | None:
    if not _seen.prepared or graph_task() != -1:  # reentrant checkpointing runs one inside another
        return None
    backwards = []
    for backward in _seen.prepared:
        model = backward.of.model()
        if model is not None:
            backward.seq = sequence_number(vars(model)["process_group"])
            backwards.append(backward)
    return backwards


def _delayed_begins(args: Args, _kwargs: Kwargs) -> tuple[Backward, Any] | None:
    for backward in _seen.prepared:
        model = backward.of.model()
        if model is not None and vars(model)["reducer"] is args[0]:
            group = vars(model)["process_group"]
            # One more comes first: which parameters are used.
            backward.seq, backward.since = sequence_number(group) + 1, monotonic_ns()
            return backward, group
    return None


def _delayed_ended(delayed: tuple[Backward, Any], _result: object) -> None:
    backward, group = delayed
    backward.is_delayed = backward.is_alone = True  # what other models do is not inside this call
    backward.advance = sequence_number(group) - backward.seq


def _backward_ended(backwards: list[Backward], _result: object) -> None:
    end = monotonic_ns()
    tracer = live.tracer
    assert tracer is not None
    synchronised = []
    for backward in backwards:
        model = backward.of.model()
        ready = backward.ready if model is None else vars(model)["reducer"].get_backward_stats()
        # Else the loss did not come from this model: it is still to come.
        if ready != backward.ready or backward.is_delayed:
            backward.ready, backward.end = ready, end
            synchronised.append((model, backward))
            if backward in _seen.prepared:
                _seen.prepared.remove(backward)
    steps, level = tracer.steps, tracer.recorder.level
    if level >= _PARTITION:
        hook.flush()
    over = None
    if steps.device is not None and recorded_of(tracer).is_on():
        over = steps.mark_operation()  # the device goes on behind it when all buckets are reduced
    for model, backward in synchronised:
        if level >= _PARTITION and hooks.recorded(model):
            continue
        own = vars(model)  # what is a module's own is not found at once: it has a `__getattr__`
        backward.step, backward.over = tracer.recorder.step, over
        if not backward.is_delayed:
            backward.is_alone = len(synchronised) == 1
            backward.advance = sequence_number(own["process_group"]) - backward.seq
        backward.is_rebuilt = bool(own.get("_has_rebuilt_buckets"))
        _write(tracer, model, backward)


def _write(tracer: Tracer, model: Any, backward: Backward) -> None:
    of, recorder = backward.of, tracer.recorder
    told, is_rebuilt = buckets.hooks_told, backward.is_rebuilt
    late, of.unwritten = of.unwritten if of.recorder is recorder else None, None  # steps of another one are not these
    if of.layout is None or of.recorder is not recorder or of.has_rebuilt != is_rebuilt or of.hooks != told:
        of.layout = layout_of(recorder, model, len(backward.ready), is_rebuilt)
        of.recorder, of.has_rebuilt, of.hooks = recorder, is_rebuilt, told
    if of.layout is None:
        # DDP says how it has rebuilt its buckets one step after it has.
        of.unwritten = backward
        return
    if late is not None and late.is_rebuilt == is_rebuilt:
        _record(tracer, of.layout, late)
    _record(tracer, of.layout, backward)


def _record(tracer: Tracer, layout: Layout, backward: Backward) -> None:
    recorder, ready_at = tracer.recorder, backward.ready.__getitem__
    since, end, step, source = backward.since, backward.end, backward.step, layout.source
    # A second model, a user's own collective or a hook's breaks the count: no number, then.
    certain = layout.counted and backward.is_alone and backward.advance == layout.advance
    seq, launch = backward.seq if certain else 0, since
    recorded = recorded_of(tracer) if certain and source == _HOST_ISSUE and not layout.tells_usage else None
    for bucket in layout.buckets:
        launch = max(launch, since + max(map(ready_at, bucket.parameters)))
        seq += certain
        number, flags = 0, _ASYNC
        if recorded is not None:
            number = recorder.number()
            if recorded.follows(layout.group, seq, number, step, launch, backward.over, is_end=True):
                flags = _ASYNC_ON_DEVICE
        # By position: names of arguments cost a twentieth of a record.
        recorder.span(
            bucket.descriptor,
            _COLLECTIVE,
            launch,
            max(end, launch),
            bucket.size,
            0,
            seq,
            0,
            0,
            -1,
            flags,
            source,
            number,
            step,
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
    Site(
        "torch.distributed",
        "Reducer._delay_all_reduce",
        begin=_delayed_begins,
        finish=_delayed_ended,
        level=Level.COLLECTIVE,
    ),
    # With manual optimization Lightning calls the reducer itself, before each backward.
    *(
        Site(
            f"{package}.strategies.ddp",
            "prepare_for_backward",
            begin=_post_forward_begins,
            finish=_post_forward_ended,
            level=Level.COLLECTIVE,
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    *hooks.ROWS,
)
