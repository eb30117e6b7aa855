"""Lightning: batches on their way to the device, metrics on their way back and across ranks, checkpoints."""

from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site
from otel_dltrace.instrument._stage_calls import stage_call, stage_site
from otel_dltrace.model.semconv import CHECKPOINT, FROM_DEVICE, REDUCE_METRICS, TO_DEVICE
from otel_dltrace.record.tracer import live

PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
"""Under both of its names."""
STRATEGIES = (
    ("ddp", "DDPStrategy"),
    ("fsdp", "FSDPStrategy"),
    ("model_parallel", "ModelParallelStrategy"),
)
"""Those of several ranks."""


def _epoch_begins(args: Args, _kwargs: Kwargs) -> None:
    """Take Lightning's number of the epoch: it asks no loader for more than it has, so that none ends."""
    assert live.tracer is not None
    loop_of(live.tracer).epoch = args[0].epoch_progress.current.processed


def _rows(trainer: str, fabric: str) -> tuple[Row, ...]:
    return (
        stage_site(f"{trainer}.strategies.strategy", "Strategy.batch_to_device", TO_DEVICE),
        stage_site(f"{trainer}.trainer.trainer", "Trainer.save_checkpoint", CHECKPOINT),
        Site(f"{trainer}.loops.fit_loop", "_FitLoop.on_advance_start", begin=_epoch_begins),
        *(stage_site(f"{trainer}.strategies.{file}", f"{name}.reduce", REDUCE_METRICS) for file, name in STRATEGIES),
        # By their callers' names: the functions themselves are used for other ways, too.
        stage_call(
            f"{trainer}.trainer.connectors.logger_connector.logger_connector",
            "convert_tensors_to_scalars",
            FROM_DEVICE,
        ),
        stage_call(f"{fabric}.wrappers", "move_data_to_device", TO_DEVICE),
        stage_site(f"{fabric}.fabric", "Fabric.to_device", TO_DEVICE),
        stage_site(f"{fabric}.fabric", "Fabric.all_reduce", REDUCE_METRICS),
        stage_site(f"{fabric}.fabric", "Fabric.save", CHECKPOINT),
    )


ROWS: tuple[Row, ...] = (
    *(row for names in PACKAGES for row in _rows(*names)),
    stage_site("torchmetrics.metric", "Metric._sync_dist", REDUCE_METRICS),
)
