"""Horovod's timeline as JSON, written byte for byte as Horovod does, but that names are escaped."""

from collections.abc import Iterable, Iterator

from otel_dltrace.formats.horovod_json import MARK, OVER, START, TICK, Event
from otel_dltrace.formats.json_events import quote

_AT_ONCE = 1 << 12
"""Pieces of text."""


def write_events(events: Iterable[Event]) -> Iterator[bytes]:
    """Yield the text of a timeline, in pieces, in the order of *events*.

    Names are escaped, which Horovod does not do, and the array is closed: the file is always JSON.
    """
    pids: dict[str, int] = {}
    parts, behind = ["[\n"], ""
    for event in events:
        if event.phase == START:
            parts.append(f"{behind}{_started(event.ts)}{_sorted(0)}")
            behind = ""
            continue
        pid = 0
        if event.phase != MARK:
            pid = pids.get(event.tensor, 0)
            if not pid:
                pid = pids[event.tensor] = len(pids) + 1
                parts.append(f"{behind}{_named(pid, event.tensor)}{_sorted(pid)}")
                behind = ""
        parts.append(behind + _text(event, pid))
        behind = ","
        if len(parts) > _AT_ONCE:
            yield "".join(parts).encode()
            parts.clear()
    if not behind:
        parts[-1] = parts[-1].rstrip(",\n")
    parts.append("]")
    yield "".join(parts).encode()


def _started(at: int) -> str:
    return f'{{"name": "process_name", "ph": "M", "pid": 0, "args": {{"start_time_since_epoch_in_micros":{at}}}}},\n'


def _named(pid: int, tensor: str) -> str:
    return f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": {quote(tensor)}}}}},\n'


def _sorted(pid: int) -> str:
    return f'{{"name": "process_sort_index", "ph": "M", "pid": {pid}, "args": {{"sort_index": {pid}}}}},\n'


def _text(event: Event, pid: int) -> str:
    phase, ts, _, name, args = event
    if phase == MARK:
        return f'{{"ph": "i", "name": {quote(name)}, "ts": {ts}, "s": "g"}}'
    named = "" if phase == OVER else f', "name": {quote(name)}'
    rest = ', "dur": 0' if phase == TICK else ""
    if args:
        dtype, bracket, shape = args.partition("[")
        rest += f', "args": {{"dtype": {quote(dtype)}, "shape": {quote(bracket + shape)}}}'
    return f'{{"ph": "{phase}"{named}, "ts": {ts}, "pid": {pid}{rest}}}'
