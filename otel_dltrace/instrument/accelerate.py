"""Hugging Face Accelerate: batches on their way to the device, metrics that ranks share, checkpoints."""

from otel_dltrace.instrument._sites import Row
from otel_dltrace.instrument._stage_calls import stage_site
from otel_dltrace.model.semconv import CHECKPOINT, REDUCE_METRICS, TO_DEVICE

_CALLS = {
    "gather": REDUCE_METRICS,
    "gather_for_metrics": REDUCE_METRICS,
    "reduce": REDUCE_METRICS,
    "save": CHECKPOINT,
    "save_model": CHECKPOINT,
    "save_state": CHECKPOINT,
}
ROWS: tuple[Row, ...] = (
    stage_site("accelerate.utils.operations", "send_to_device", TO_DEVICE, in_graphs=True),
    *(stage_site("accelerate.accelerator", f"Accelerator.{name}", stage) for name, stage in _CALLS.items()),
)
