"""How much memory there is for who reads much at once."""

from otel_dltrace.export.metrics.container import Container, Memory
from otel_dltrace.record.guard import tried


def available_memory() -> int:
    """Return how many bytes of memory may still be used here.

    Raises:
        ImportError: psutil is missing, which could tell.
    """
    import psutil

    host = psutil.virtual_memory()
    limited = tried(Container(host.total, 1).memory)
    if not isinstance(limited, Memory):
        return int(host.available)
    return min(int(host.available), limited.limit - limited.used + limited.reclaimable)
