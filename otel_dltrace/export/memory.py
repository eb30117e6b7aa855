"""How much memory there is for who reads much at once."""

import sys

from otel_dltrace.export.metrics.container import Container, Memory
from otel_dltrace.record.guard import tried


def available_memory() -> int:
    """Return how many bytes of memory may still be used here; any number where psutil is missing, which could tell."""
    try:
        import psutil
    except ImportError:
        return sys.maxsize

    host = psutil.virtual_memory()
    limited = tried(Container(host.total, 1).memory)
    if not isinstance(limited, Memory):
        return int(host.available)
    return min(int(host.available), limited.limit - limited.used + limited.reclaimable)
