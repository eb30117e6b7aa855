"""The stages of a PyTorch training step: batches, forward, backward, optimizers, schedulers.

What runs in every step is flat: between two kernels Python's code is cold, and every frame costs microseconds.
"""

import sys
from itertools import count
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._batch_sizes import batch_size
from otel_dltrace.instrument._by_identity import ByIdentity
from otel_dltrace.instrument._loop import Loop, loop_of
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo
from otel_dltrace.instrument._stage_calls import stage_site
from otel_dltrace.instrument._torch.roots import Roots
from otel_dltrace.instrument._torch.schedulers import ROWS as SCHEDULERS
from otel_dltrace.instrument._torch.script import SCRIPT, graphs
from otel_dltrace.instrument._torch.states import STATES
from otel_dltrace.model.semconv import CHECKPOINT, TO_DEVICE
from otel_dltrace.record.guard import failed, pass_on
from otel_dltrace.record.tracer import live


def _loop() -> Loop:
    tracer = live.tracer
    assert tracer is not None
    return loop_of(tracer)


# -- batches ----------------------------------------------------------------------------------------

_numbers: ByIdentity[int] = ByIdentity()
"""What the batches of each sampler are known by."""
_turns = count(1)


def _fetch_begins(args: Args, _kwargs: Kwargs) -> tuple[Any, int]:
    assert live.tracer is not None
    loop = live.tracer.loop or _loop()
    if get_ident() == loop.home:  # one that fetches ahead says nothing of the forward that is running
        forward.here.running, loop.fetching = None, True
    return args[0], monotonic_ns()


def _fetched(span: tuple[Any, int], batch: Any) -> None:
    end = monotonic_ns()
    iterator, start = span
    root = forward.latest()
    in_training = roots.training if root is None else bool(getattr(root, "training", True))
    # A loader has one sampler for all its iterators; evaluation is often in another mode of the model.
    sampler = getattr(iterator, "_index_sampler", iterator)
    source = (_numbers.get(sampler, 0) or _number(sampler), in_training)
    try:
        size = batch_size(batch)
    except Exception as broken:  # noqa: BLE001  -- a batch of a class of one's own may say of its shape what it likes
        pass_on(broken)
        size = 0
    assert live.tracer is not None
    loop = live.tracer.loop or _loop()
    if loop.epoch >= 0:  # each sampler knows what it was told: that of an evaluation may count otherwise
        told = getattr(getattr(sampler, "sampler", sampler), "epoch", None)
        loop.epoch = told if isinstance(told, int) else loop.epoch
    loop.fetched(iterator, start, end, size, source, training=forward.is_grad_enabled())


def _number(sampler: Any) -> int:
    """Return the number of a loader's *sampler* that is new: an id may be that of one which is gone."""
    number = next(_turns)
    try:
        _numbers[sampler] = number
    except TypeError:  # one that takes no weak reference, such as a list
        return id(sampler)
    return number


def _fetch_failed(span: tuple[Any, int], error: BaseException) -> None:
    if isinstance(error, StopIteration):
        _loop().exhausted(span[0])
    else:
        _loop().fetch_failed()


def _epoch_told(args: Args, kwargs: Kwargs) -> None:
    """Take the program's number of the epoch that comes, which it tells its sampler so that ranks shuffle alike."""
    epoch = args[1] if len(args) > 1 else kwargs["epoch"]
    if isinstance(epoch, int):
        _loop().epoch = epoch


def _worker_begins(_args: Args, _kwargs: Kwargs) -> None:
    """Trace nothing in a process that loads batches: what its models compute is no step's forward.

    Nor are the user's spans there below the step that was current when it was forked: it serves many.
    """
    tracer, live.tracer = live.tracer, None
    assert tracer is not None
    tracer.steps.on_left()


# -- backward, scalers -------------------------------------------------------------------------------


def _backward_begins(_args: Args, _kwargs: Kwargs) -> int | None:
    if forward.graph_task() != -1:
        return None  # reentrant checkpointing runs one inside another
    start = monotonic_ns()
    assert live.tracer is not None
    loop = live.tracer.loop or _loop()
    loop.backward_begins(start)
    return start


def _backward_ended(start: int, _result: object) -> None:
    end = monotonic_ns()
    assert live.tracer is not None
    loop = live.tracer.loop or _loop()
    loop.backward_ended(start, end)


def _scaler_begins(args: Args, _kwargs: Kwargs) -> object:
    _loop().optimizer_begins(args[0], monotonic_ns())
    return args[0]


def _scaler_ended(scaler: object, _result: object) -> None:
    """End a cycle also where the scaler found inf and skipped its optimizer: other ranks may not have."""
    loop = _loop()
    loop.optimizer_ended(scaler, monotonic_ns())
    loop.stepped.discard(id(scaler))  # it steps several optimizers after one forward


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


def _optimizer_begins(optimizer: Any, _args: Args, _kwargs: Kwargs) -> None:
    compiler = sys.modules["torch"].compiler  # as `_torch.root_hooks.compiling` does
    if compiler.is_dynamo_compiling() or getattr(compiler, "_is_compiling_flag", False):
        _keep_out(optimizer)
        return
    tracer = live.tracer
    if tracer is not None:
        try:
            if forward.here.running is not None:
                forward.here.leave()
            loop = tracer.loop or _loop()
            loop.optimizer_begins(optimizer, monotonic_ns())
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("optimizer", broken)


def _optimizer_ended(optimizer: Any, _args: Args, _kwargs: Kwargs) -> None:
    compiler = sys.modules["torch"].compiler
    if compiler.is_dynamo_compiling() or getattr(compiler, "_is_compiling_flag", False):
        _keep_out(optimizer)
        return
    tracer = live.tracer
    if tracer is not None:
        try:
            loop = tracer.loop or _loop()
            loop.optimizer_ended(optimizer, monotonic_ns())
            roots.stepped(optimizer)
        except Exception as broken:  # noqa: BLE001  -- see above
            failed("optimizer", broken)


def _optimizer_made(optimizer: Any, _result: object) -> None:
    roots.made(optimizer)


def _keep_out(optimizer: Any) -> None:
    """Keep one of torch's optimizers out of a graph that is being compiled.

    Inside a graph the hooks would be constants and its steps not seen. Torch's own optimizers
    that know ``differentiable`` break the graph anyway: so nothing is lost that could be had.
    """
    if type(optimizer).__module__.startswith("torch.optim.") and "differentiable" in optimizer.defaults:
        sys.modules["torch"]._dynamo.graph_break()


# -- forward ----------------------------------------------------------------------------------------


roots = Roots()
forward = roots.forward


def _compiled_begins(args: Args, _kwargs: Kwargs) -> bool:
    roots.meet_compiled(args[0])
    return True


def _compiled_ended(_span: bool, _result: object) -> None:
    roots.compiled_called()


def _graph_begins(_args: Args, _kwargs: Kwargs) -> None:
    roots.stop_looking()


def _itself(args: Args, _kwargs: Kwargs) -> Any:
    return args[0]


def _compiled(module: Any, _result: object) -> None:
    roots.compiled_in_place(module)


def _is_of_program(args: Args, kwargs: Kwargs) -> bool:
    """Return whether something of the program's is saved: torch saves a storage where a tensor is pickled."""
    return not sys.modules["torch"].is_storage(args[0] if args else kwargs.get("obj"))


DCP_SAVES = ("save", "async_save", "save_state_dict")

ROWS: tuple[Row, ...] = (
    Site(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter.__next__",
        begin=_fetch_begins,
        finish=_fetched,
        fail=_fetch_failed,
    ),
    Site("torch.utils.data.distributed", "DistributedSampler.set_epoch", begin=_epoch_told),
    Site("torch.utils.data._utils.worker", "_worker_loop", begin=_worker_begins),
    # In the loader's own thread it is beside the step; here it is a part of the way to the device.
    stage_site("torch.utils.data._utils.pin_memory", "pin_memory", TO_DEVICE),
    Attachment("torch.nn.modules.module", roots.attach),
    Site("torch._dynamo.callback", "CompilationCallbackHandler.run_start_callbacks", begin=_graph_begins),
    Site("torch.nn.modules.module", "Module.compile", begin=_itself, finish=_compiled),
    # Before that it has none of its own, and does not mind global hooks.
    Site(
        "torch._dynamo.eval_frame",
        "OptimizedModule.__call__",
        begin=_compiled_begins,
        finish=_compiled_ended,
        fail=_compiled_ended,
        since="2.8",
    ),
    Site("torch.autograd", "backward", begin=_backward_begins, finish=_backward_ended, fail=_backward_ended),
    Attachment("torch.optim.optimizer", _attach_to_optimizers),
    Site("torch.optim.optimizer", "Optimizer.__init__", begin=_itself, finish=_optimizer_made),
    Site(
        "torch.amp.grad_scaler",
        "GradScaler.step",
        begin=_scaler_begins,
        finish=_scaler_ended,
        fail=_scaler_failed,
    ),
    Site(
        "torch.distributed.autograd", "backward", begin=_backward_begins, finish=_backward_ended, fail=_backward_ended
    ),
    # It steps on the ranks that have the parameters, mostly by functions, which no hook sees.
    Site(
        "torch.distributed.optim.optimizer",
        "DistributedOptimizer.step",
        begin=_scaler_begins,
        finish=_scaler_ended,
        fail=_scaler_failed,
    ),
    *SCHEDULERS,
    stage_site("torch.serialization", "save", CHECKPOINT, is_one=_is_of_program),
    *(stage_site("torch.distributed.checkpoint.state_dict_saver", name, CHECKPOINT) for name in DCP_SAVES),
    *SCRIPT,
    graphs(forward),
    *STATES,
)
