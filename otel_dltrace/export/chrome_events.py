"""From laid out spans to the lines of a Chrome trace, formatted in bulk."""

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from otel_dltrace.export.chrome_layout import FAMILIES, Layout, thread_of
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import Value, collective_ids, constant_attributes, number_columns
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Column, SpanBatch

SPAN_ID = "span_id"
CLAMPED = "clamped_ns"
"""By how much a slice is shorter than its span, to stay inside its parent."""
CHUNK = 1 << 14
FLOW_DTYPE = np.dtype([("id", "<u8"), ("ns", "<i8"), ("pid", "<u4"), ("tid", "<u4")])

# Names of chrome://tracing's palette; it refuses a trace that uses any other.
COLOURS = {
    s.STEP: "grey",
    s.STAGE: "thread_state_running",
    s.COLLECTIVE: "rail_response",
    s.P2P: "rail_animation",
    s.PHASE: "thread_state_iowait",
}
WAIT_COLOUR, ERROR_COLOUR, TRUNCATED_COLOUR = "thread_state_runnable", "terrible", "black"

_SPAN = '{"ph":"X","tid":%d,"ts":%d.%04d,"dur":%d.%04d,%s'
_TICK = '{"ph":"i","s":"t","tid":%d,"ts":%d.%04d,%s'
_FLOW = '{"ph":"%s","id":"0x%016x","pid":%d,"tid":%d,"ts":%d.%04d,"bp":"e","name":"collective","cat":"collective"}'
_METADATA = '{"ph":"M","pid":%d,"tid":%d,"name":"%s","args":{"%s":%s}}'


def quote(text: str) -> str:
    """Return *text* as a JSON string; a lone surrogate, which no UTF-8 reader takes, becomes ``?``."""
    return json.dumps(text.encode("utf-8", "replace").decode())


def microseconds(ns: Column) -> tuple[Column, Column]:
    """Return *ns* as whole us and ten-thousandths of a us.

    Perfetto reads a float, multiplies it by 1,000 and cuts the rest off, which loses a ns for every
    tenth number: a child would stick out of its parent. Those numbers get a tenth of a ns more.
    """
    size = np.abs(ns)
    lost = np.floor(size / 1000.0 * 1000.0) < size
    return np.sign(ns) * (size // 1000), size % 1000 * 10 + lost


def process_metadata(pid: int, name: str, label: str, sort_index: int) -> Iterator[str]:
    """Yield the lines that name a process and put it in its place."""
    yield _METADATA % (pid, 0, "process_name", "name", quote(name))
    yield _METADATA % (pid, 0, "process_labels", "labels", quote(label))
    yield _METADATA % (pid, 0, "process_sort_index", "sort_index", sort_index)


def lane_metadata(pid: int, before: list[int], now: list[int]) -> Iterator[str]:
    """Yield the lines that name the lanes which a process got since *before* (lanes by family)."""
    for family, (first, end) in enumerate(zip(before, now, strict=True)):
        for lane in range(first, end):
            name = FAMILIES[family] + (f" {lane + 1}" if lane else "")
            tid = thread_of(family, lane)
            yield _METADATA % (pid, tid, "thread_name", "name", quote(name))
            yield _METADATA % (pid, tid, "thread_sort_index", "sort_index", family * 1_000_000 + lane)


class Chunk(NamedTuple):
    """Formatted events of some rows, and where their collectives are drawn (``FLOW_DTYPE``)."""

    lines: list[str]
    flows: Column


def span_chunks(batch: SpanBatch, layout: Layout, pid: int) -> Iterator[Chunk]:
    """Yield the events of *batch*, in the layout's order, some thousand at a time."""
    for first in range(0, len(layout.order), CHUNK):
        yield _chunk(batch, layout, layout.order[first : first + CHUNK], pid)


def _chunk(batch: SpanBatch, layout: Layout, which: Column, pid: int) -> Chunk:
    part = batch.take(which)
    start, length = layout.start[which], layout.end[which] - layout.start[which]
    tid, ticks, cut, ids = layout.tid[which], layout.ticks[which], layout.cut[which], collective_ids(part)
    optional = [
        *((_slot(name, "%d"), values, mask) for name, values, mask in number_columns(part)),
        (_slot(s.DL_COMM_COLLECTIVE_ID, '"%016x"'), ids, ids != 0),
        (_slot(CLAMPED, "%d"), cut, cut > 0),
    ]
    head = [tid, *microseconds(start), *microseconds(length), _constants(part, pid), part["span_id"]]
    lines = np.empty(len(which), object)
    # Rows that carry the same attributes share a template: a few dozen in any trace.
    pattern = ticks.astype(np.int64)
    for bit, (_, _, mask) in enumerate(optional, 1):
        pattern |= mask.astype(np.int64) << bit
    for bits in np.unique(pattern).tolist():
        rows = np.flatnonzero(pattern == bits)
        carried = [(slot, values) for bit, (slot, values, _) in enumerate(optional, 1) if bits >> bit & 1]
        columns = head[:3] + head[5:] if bits & 1 else head
        template = (_TICK if bits & 1 else _SPAN) + f'"{SPAN_ID}":"%016x"' + "".join(slot for slot, _ in carried)
        values = (column[rows].tolist() for column in (*columns, *(column for _, column in carried)))
        lines[rows] = list(map((template + "}}").__mod__, zip(*values, strict=True)))
    joined = (ids != 0) & (length > 0)
    flows = np.zeros(int(joined.sum()), FLOW_DTYPE)
    flows["id"], flows["ns"], flows["pid"], flows["tid"] = ids[joined], start[joined], pid, tid[joined]
    return Chunk(lines.tolist(), flows)


def _slot(name: str, value: str) -> str:
    return f",{json.dumps(name)}:{value}"


def _constants(batch: SpanBatch, pid: int) -> Column:
    """Return the part of each row's text that depends on descriptor, source, flags and error alone."""
    rows = batch.rows
    key = rows["error"].astype(np.uint64) << np.uint64(43) | rows["descriptor"].astype(np.uint64) << np.uint64(11)
    key |= rows["source"].astype(np.uint64) << np.uint64(3) | (rows["flags"] & 7).astype(np.uint64)
    _, firsts, inverse = np.unique(key, return_index=True, return_inverse=True)
    texts = np.empty(len(firsts), object)
    for i, row in enumerate(firsts.tolist()):
        error, source = int(rows["error"][row]), min(int(rows["source"][row]), s.Source.BOUND)
        error_type = batch.errors[error][0] if error < len(batch.errors) else ""
        texts[i] = constant_text(batch.descriptor_of(row), source, int(rows["flags"][row]), error_type, pid)
    return texts[inverse]


def constant_text(d: Descriptor, source: int, flags: int, error_type: str, pid: int) -> str:
    """Return process, name, category, colour and the constant attributes, as the middle of an event."""
    colour = COLOURS.get(d.kind, COLOURS[s.PHASE])
    if d.name == s.WAIT:
        colour = WAIT_COLOUR
    if flags & s.Flag.TRUNCATED:
        colour = TRUNCATED_COLOUR
    if flags & s.Flag.ERROR:
        colour = ERROR_COLOUR
    attributes = constant_attributes(d, source, flags, error_type).items()
    args = "".join(f"{quote(name)}:{_value(value)}," for name, value in attributes)
    return f'"pid":{pid},"name":{quote(d.name)},"cat":{quote(d.kind)},"cname":"{colour}","args":{{{args}'


def _value(value: Value) -> str:
    return quote(value) if isinstance(value, str) else json.dumps(value)


def flow_lines(parts: Iterable[Column]) -> Iterator[list[str]]:
    """Yield the arrows that join the same collective on two or more processes, from the first to the last to begin."""
    flows = np.concatenate([np.zeros(0, FLOW_DTYPE), *parts])
    flows = flows[np.lexsort((flows["ns"], flows["pid"], flows["id"]))]
    again = (flows["id"][1:] == flows["id"][:-1]) & (flows["pid"][1:] == flows["pid"][:-1])
    flows = flows[np.concatenate([[True], ~again])[: len(flows)]]
    flows = flows[np.lexsort((flows["ns"], flows["id"]))]
    same = flows["id"][1:] == flows["id"][:-1]
    after = np.concatenate([[False], same])[: len(flows)]
    before = np.concatenate([same, [False]])[: len(flows)]
    phase = np.where(after, np.where(before, "t", "f"), "s")
    joined = np.flatnonzero(after | before)
    for first in range(0, len(joined), CHUNK):
        rows = joined[first : first + CHUNK]
        f = flows[rows]
        # Half a ns inside the slice: at its very start rounding can put the arrow's end before it.
        whole, part = f["ns"] // 1000, f["ns"] % 1000 * 10 + 5
        columns = (phase[rows], f["id"], f["pid"], f["tid"], whole, part)
        yield list(map(_FLOW.__mod__, zip(*(c.tolist() for c in columns), strict=True)))
