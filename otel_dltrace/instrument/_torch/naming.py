"""What the collectives of this context are for: a parallel training says so around its calls."""

from contextvars import ContextVar

tensor_name: "ContextVar[str]" = ContextVar("otel_dltrace.tensor_name", default="")
"""The name of the module whose parameters are communicated (``dl.tensor.name``), "" for none."""
