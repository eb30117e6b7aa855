"""ps-lite's van profile as spans and back: a tick for each message."""

from collections.abc import Iterable, Iterator

import numpy as np

from otel_dltrace.formats.comm_spans import Rows
from otel_dltrace.formats.van_profile import Message, VanProfile
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch, empty_rows

_US = 1000
_BACKEND, _ACTIVITY = "ps-lite", "_van_recv_"


def van_rows_of(profile: VanProfile) -> Rows:
    """Return the messages as ticks in the file's order; times are Unix ns, and outside any step."""
    messages = profile.messages
    known: dict[Descriptor, int] = {}
    rows = empty_rows(len(messages))
    rows["span_no"] = np.arange(1, len(rows) + 1)
    rows["step"], rows["level"], rows["a"], rows["b"] = NO_STEP, s.Level.PARTITION, -1, -1
    numbers = [known.setdefault(_descriptor(m.role, m.operation), len(known)) for m in messages]
    if messages:
        rows["descriptor"], rows["partition"] = numbers, [m.partition for m in messages]
        rows["start"] = rows["end"] = np.array([m.at for m in messages], np.int64) * _US
    return Rows(rows, list(known))


def _descriptor(role: str, operation: str) -> Descriptor:
    return Descriptor(s.TICK, f"recv_{operation}", backend=_BACKEND, activity=f"{role}{_ACTIVITY}{operation}")


def messages_of(pieces: Iterable[SpanBatch]) -> Iterator[Message]:
    """Yield the messages in *pieces*, of one node, in their order."""
    for batch in pieces:
        held = batch.take(batch.lookup(lambda d: d.kind == s.TICK and d.backend == _BACKEND, bool))
        at = (held["start"] + np.int64(held.wall)) // _US
        columns = (held["descriptor"], held["partition"], at)
        for number, partition, when in zip(*(column.tolist() for column in columns), strict=True):
            role, _, operation = held.descriptors[number].activity.partition(_ACTIVITY)
            yield Message(partition, role, operation, when)
