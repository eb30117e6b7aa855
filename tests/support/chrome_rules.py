"""The rules that viewers have for a Chrome trace, as one pure function over its events.

Perfetto: src/trace_processor/importers/json and slice_tracker; chrome://tracing: catapult's trace_event_importer and
slice_group. Both hold a stack of open slices per lane; where slices begin together Perfetto takes the longer one for
the outer one, catapult the one that comes first in the file.
"""

import math
from collections import defaultdict
from typing import Any

# fmt: off
PALETTE = {  # catapult's tracing/tracing/base/color_scheme.html; another name makes it refuse the trace
    "thread_state_uninterruptible", "thread_state_iowait", "thread_state_running", "thread_state_runnable",
    "thread_state_sleeping", "thread_state_unknown", "background_memory_dump", "light_memory_dump",
    "detailed_memory_dump", "vsync_highlight_color", "generic_work", "good", "bad", "terrible", "black", "grey",
    "white", "yellow", "olive", "rail_response", "rail_animation", "rail_idle", "rail_load", "startup",
}
# fmt: on
Event = dict[str, Any]
Lane = tuple[int, int]


def ns(us: float) -> int:
    """Return *us* as Perfetto does: a float times 1,000, cut off."""
    return int(us * 1000.0)


def complaints(events: list[Event]) -> list[str]:
    """Return what a viewer would not like about *events*; nothing if all is well."""
    out = [f"{rule}: {event}" for event in events for rule in _fields(event)]
    if out:
        return out
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    slices: dict[Lane, list[tuple[int, int, str]]] = defaultdict(list)
    for e in events:
        if e["ph"] in "Xi":
            if (e["pid"], e["tid"]) not in named or e["pid"] not in processes:
                out.append(f"lane without a name: {e}")
            start = ns(e["ts"])
            slices[e["pid"], e["tid"]].append((start, start + ns(e.get("dur", 0)), e["name"]))
    for lane, found in slices.items():
        longer_first = sorted(found, key=lambda one: (one[0], -one[1]))
        in_file_order = sorted(found, key=lambda one: one[0])
        for order, rule in ((longer_first, "Perfetto"), (in_file_order, "catapult")):
            out += [f"{rule} nests on {lane}: {wrong}" for wrong in partial_overlaps(order)]
    return out + _flows([e for e in events if e["ph"] in "stf"], slices)


def partial_overlaps(slices: list[tuple[int, int, str]]) -> list[Any]:
    """Return the slices, given in the order of nesting, that begin inside another and end outside it."""
    wrong = []
    stack: list[int] = []
    for start, end, name in slices:
        while stack and stack[-1] <= start:
            stack.pop()
        if stack and end > stack[-1]:
            wrong.append((name, start, end, stack[-1]))
        stack.append(end)
    return wrong


def _fields(event: Event) -> list[str]:
    wrong = []
    if event.get("ph") not in {"X", "i", "C", "M", "s", "t", "f"}:
        wrong.append("unknown phase")
    if not isinstance(event.get("name"), str):
        wrong.append("no name")
    if not all(type(event.get(name)) is int and event[name] >= 0 for name in ("pid", "tid")) or event["pid"] == 0:
        wrong.append("no process and lane")
    if event.get("ph") != "M":
        wrong += [f"bad {name}" for name in ("ts", "dur") if not _time(event.get(name, 0 if name == "dur" else None))]
    if event.get("cname", "grey") not in PALETTE:
        wrong.append("unknown colour")
    if event.get("ph") == "C" and not all(type(value) is int for value in event["args"].values()):
        wrong.append("no count")
    return wrong


def _time(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _flows(flows: list[Event], slices: dict[Lane, list[tuple[int, int, str]]]) -> list[str]:
    out = []
    by_id = defaultdict(list)
    for e in flows:
        by_id[e["id"]].append(e["ph"])
        at = e["ts"] * 1000.0
        if not any(start <= at <= end for start, end, _ in slices[e["pid"], e["tid"]]):
            out.append(f"arrow beside every slice: {e}")
    for number, phases in by_id.items():
        if [phases.count("s"), phases.count("f")] != [1, 1]:
            out.append(f"arrow {number} has the ends {phases}")
    return out
