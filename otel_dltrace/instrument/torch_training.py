"""The stages of a PyTorch training step: batches, forward, backward, optimizers, schedulers."""

import sys
from collections.abc import Mapping
from time import monotonic_ns
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._loop import Loop, loop_of
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo
from otel_dltrace.instrument._torch_roots import Roots
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.steps import Tracer, live


def _loop() -> Loop:
    return loop_of(_tracer())


def _tracer() -> Tracer:
    tracer = live.tracer
    assert tracer is not None
    return tracer


# -- batches ----------------------------------------------------------------------------------------


def _fetch_begins(args: Args, _kwargs: Kwargs) -> tuple[Any, int]:
    roots.forget_running()
    return args[0], monotonic_ns()


def _fetched(span: tuple[Any, int], batch: Any) -> None:
    iterator, start = span
    end = monotonic_ns()
    _loop().fetched(iterator, start, end, batch_size(batch), training=sys.modules["torch"].is_grad_enabled())


def _fetch_failed(span: tuple[Any, int], error: BaseException) -> None:
    if isinstance(error, StopIteration):
        _loop().exhausted(span[0])


def batch_size(batch: Any, depth: int = 3) -> int:
    """Return the first dimension of the first tensor in *batch*, 0 where there is none near its top."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not depth or not isinstance(batch, (list, tuple)):
        return 0
    sizes = (batch_size(part, depth - 1) for part in batch[:8])
    return next((size for size in sizes if size), 0)


# -- backward, schedulers, scalers -------------------------------------------------------------------


def _backward_begins(_args: Args, _kwargs: Kwargs) -> int | None:
    loop = _loop()
    if loop.in_backward:
        return None  # reentrant checkpointing runs one inside another
    loop.in_backward = True
    return monotonic_ns()


def _backward_ended(start: int, _result: object) -> None:
    loop = _loop()
    loop.in_backward = False
    loop.backward_ended(start, monotonic_ns())


_scheduling: list[object] = []


def _scheduler_begins(args: Args, _kwargs: Kwargs) -> int | None:
    scheduler = args[0]
    # A constructor takes the first step itself, having set the count to 0 just before; chained
    # schedulers step one another.
    if _scheduling or getattr(scheduler, "_step_count", 1) == 0:
        return None
    _scheduling.append(scheduler)
    return monotonic_ns()


def _scheduler_ended(start: int, _result: object) -> None:
    _scheduling.clear()
    _loop().scheduler_ended(start, monotonic_ns())


def _scaler_begins(args: Args, _kwargs: Kwargs) -> object:
    _loop().optimizer_begins(args[0], monotonic_ns())
    return args[0]


def _scaler_ended(scaler: object, _result: object) -> None:
    """End a cycle also where the scaler found inf and skipped its optimizer: other ranks may not have."""
    _loop().optimizer_ended(scaler, monotonic_ns())


def _scaler_failed(scaler: object, _error: BaseException) -> None:
    _loop().optimizer_ended(scaler, monotonic_ns(), failed=True)


# -- optimizers -------------------------------------------------------------------------------------


def _attach_to_optimizers(module: ModuleType) -> Undo:
    """Use torch's own global hooks, which see every optimizer, also those that a user wrote."""
    before = module.register_optimizer_step_pre_hook(_optimizer_begins)
    after = module.register_optimizer_step_post_hook(_optimizer_ended)

    def detach() -> None:
        before.remove()
        after.remove()

    return detach


@guarded
def _optimizer_begins(optimizer: Any, _args: Args, _kwargs: Kwargs) -> None:
    if live.tracer is not None:
        roots.forget_running()
        _loop().optimizer_begins(optimizer, monotonic_ns())


@guarded
def _optimizer_ended(optimizer: Any, _args: Args, _kwargs: Kwargs) -> None:
    if live.tracer is not None:
        _loop().optimizer_ended(optimizer, monotonic_ns())
        roots.stepped(optimizer)


# -- forward ----------------------------------------------------------------------------------------


def _forward_begins() -> tuple[int, bool] | None:
    if live.tracer is None or _loop().in_backward:
        return None  # in a backward it is a recomputation
    training = sys.modules["torch"].is_grad_enabled()
    start = monotonic_ns()
    _loop().forward_begins(start, training=training)
    return start, training


def _forward_ended(span: tuple[int, bool]) -> None:
    if live.tracer is not None:
        start, training = span
        _loop().forward_ended(start, monotonic_ns(), training=training)


roots = Roots(_forward_begins, _forward_ended)


def _compiled_called(args: Args, _kwargs: Kwargs) -> None:
    roots.meet_compiled(args[0])


def _compile_begins(args: Args, _kwargs: Kwargs) -> Any:
    return args[0]


def _compiled(module: Any, _result: object) -> None:
    roots.compiled_in_place(module)


SCHEDULERS = ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts")
"""Those of torch that have a ``step`` of their own."""

ROWS: tuple[Row, ...] = (
    Site(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter.__next__",
        begin=_fetch_begins,
        finish=_fetched,
        fail=_fetch_failed,
    ),
    Attachment("torch.nn.modules.module", roots.attach),
    Site("torch.nn.modules.module", "Module.compile", begin=_compile_begins, finish=_compiled),
    Site("torch._dynamo.eval_frame", "OptimizedModule.__call__", begin=_compiled_called),
    Site("torch.autograd", "backward", begin=_backward_begins, finish=_backward_ended, fail=_backward_ended),
    Attachment("torch.optim.optimizer", _attach_to_optimizers),
    Site(
        "torch.amp.grad_scaler",
        "GradScaler.step",
        begin=_scaler_begins,
        finish=_scaler_ended,
        fail=_scaler_failed,
    ),
    *(
        Site(
            "torch.optim.lr_scheduler",
            f"{name}.step",
            begin=_scheduler_begins,
            finish=_scheduler_ended,
            fail=_scheduler_ended,
        )
        for name in SCHEDULERS
    ),
)
