"""Hugging Face Accelerate: batches on their way to the device, metrics that ranks share, checkpoints."""

from otel_dltrace.instrument._sites import Row
from otel_dltrace.instrument._stage_calls import stage_site

_CALLS = {
    "gather": "reduce_metrics",
    "gather_for_metrics": "reduce_metrics",
    "reduce": "reduce_metrics",
    "save": "checkpoint",
    "save_model": "checkpoint",
    "save_state": "checkpoint",
}
ROWS: tuple[Row, ...] = (
    stage_site("accelerate.utils.operations", "send_to_device", "to_device", in_graphs=True),
    *(stage_site("accelerate.accelerator", f"Accelerator.{name}", stage) for name, stage in _CALLS.items()),
)
