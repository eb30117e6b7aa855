"""The parts of a Chrome trace that both writers share: texts, times, colours, names of processes and lanes."""

import json
from collections.abc import Container, Iterator, Mapping

import numpy as np

from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import Value
from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.model.text import clean

SPAN_ID = "span_id"
CLAMPED = "clamped_ns"
"""By how much a slice is shorter than its span, to stay inside its parent."""

# Names of chrome://tracing's palette; it refuses a trace that uses any other.
COLOURS = {
    s.STEP: "grey",
    s.STAGE: "thread_state_running",
    s.COLLECTIVE: "rail_response",
    s.P2P: "rail_animation",
    s.PHASE: "thread_state_iowait",
}
# One for each of BytePS's queue types, none of which means anything else in a push_pull's lanes.
QUEUE_COLOURS = {
    QueueType.COORDINATE_REDUCE: "thread_state_uninterruptible",
    QueueType.REDUCE: "thread_state_running",
    QueueType.COPYD2H: "background_memory_dump",
    QueueType.PCIE_REDUCE: "good",
    QueueType.COORDINATE_PUSH: "thread_state_unknown",
    QueueType.COMPRESS: "detailed_memory_dump",
    QueueType.PUSH: "rail_animation",
    QueueType.PULL: "rail_idle",
    QueueType.DECOMPRESS: "light_memory_dump",
    QueueType.COPYH2D: "vsync_highlight_color",
    QueueType.COORDINATE_BROADCAST: "olive",
    QueueType.BROADCAST: "yellow",
}
_BY_QUEUE = {queue.name: colour for queue, colour in QUEUE_COLOURS.items()}
WAIT_COLOUR, ERROR_COLOUR, TRUNCATED_COLOUR = "thread_state_runnable", "terrible", "black"

FIRST_FREE_PID = 1_000_001
_ROLE_ORDER = {"worker": 0, "server": 1_000_000, "scheduler": 2_000_000}
UNKNOWN_ORDER = 3_000_000
HOST_ORDER = 4_000_000
_METADATA = '{"ph":"M","pid":%d,"tid":%d,"name":"%s","args":{"%s":%s}}'


def quote(text: str) -> str:
    """Return *text* as a JSON string; a lone surrogate, which no UTF-8 reader takes, becomes ``?``."""
    return json.dumps(clean(text))


def microseconds(ns: Column) -> tuple[Column, Column]:
    """Return *ns* as whole us and ten-thousandths of a us.

    Perfetto reads a float, multiplies it by 1,000 and cuts the rest off, which loses a ns for every
    tenth number: a child would stick out of its parent. Those numbers get a tenth of a ns more.
    """
    size = np.abs(ns)
    lost = np.floor(size / 1000.0 * 1000.0) < size
    return np.sign(ns) * (size // 1000), size % 1000 * 10 + lost


def colour_of(kind: str, name: str, truncated: bool, error: bool, queue_type: str = "") -> str:
    """Return the colour of a slice (of a push_pull's stage by its queue); what went wrong wins over what it is."""
    if error:
        return ERROR_COLOUR
    if truncated:
        return TRUNCATED_COLOUR
    return _BY_QUEUE.get(queue_type) or (WAIT_COLOUR if name == s.WAIT else COLOURS.get(kind, COLOURS[s.PHASE]))


def process_names(rank: Mapping[str, Value], host: str) -> tuple[str, int]:
    """Return the name of the process with *rank* (attributes of a resource) on *host*, and its place among others."""
    role, number, world = str(rank[s.DL_ROLE]), int(rank[s.DL_RANK]), str(rank[s.DL_WORLD])
    who = "rank" if role == "worker" else role
    before = "" if world == "default" else f"{world} "
    return f"{before}{who} {number} ({host})", _ROLE_ORDER.get(role, UNKNOWN_ORDER) + number


def rank_pid(rank: Mapping[str, Value], used: Container[int]) -> int:
    """Return rank + 1 for a worker, as pid 0 is the kernel's in Perfetto; else a number no rank has."""
    if rank.get(s.DL_ROLE) == "worker" and int(rank[s.DL_RANK]) + 1 not in used:
        return int(rank[s.DL_RANK]) + 1
    return free_pid(FIRST_FREE_PID, used)


def free_pid(pid: int, used: Container[int]) -> int:
    """Return *pid*, or the next one that is not *used*."""
    while pid in used:
        pid += 1
    return pid


def process_metadata(pid: int, name: str, label: str, sort_index: int) -> Iterator[str]:
    """Yield the lines that name a process and put it in its place."""
    yield _METADATA % (pid, 0, "process_name", "name", quote(name))
    if label:
        yield _METADATA % (pid, 0, "process_labels", "labels", quote(label))
    yield _METADATA % (pid, 0, "process_sort_index", "sort_index", sort_index)


def lane_metadata(pid: int, tid: int, name: str, sort_index: int) -> Iterator[str]:
    """Yield the lines that name a lane and put it in its place."""
    yield _METADATA % (pid, tid, "thread_name", "name", quote(name))
    yield _METADATA % (pid, tid, "thread_sort_index", "sort_index", sort_index)
