"""How well an end is known that was found, not told."""

from otel_dltrace.model.semconv import PRECISE_NS, Source

# Plain ints: an operator on a member of an enum costs as much as a record.
_HOST_DONE, _BOUND = int(Source.HOST_DONE), int(Source.BOUND)


def source_of(seen: int, now: int) -> int:
    """Return the source of the end of what was last seen not to be done at *seen*, and to be done at *now*."""
    return _HOST_DONE if now - seen <= PRECISE_NS else _BOUND
