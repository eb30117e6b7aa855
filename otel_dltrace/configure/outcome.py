"""What became of a run's spans, as its drains have written it down."""

import json
import os
import time
from pathlib import Path
from typing import Any

from otel_dltrace.model.summary import summary_line
from otel_dltrace.record import guard
from otel_dltrace.record.launch import DrainStarter


def short_path(path: Path) -> str:
    """Return *path* relative to here, if that is shorter."""
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except FileNotFoundError:  # here is nowhere: the working directory has been removed
        return str(path)


def read_summary(run: Path, *, is_over: bool = True) -> str:
    """Return in one line what became of the spans of *run*, as far as its drains, which may be at work, have told."""
    lines = [summary_line(figures, is_over=is_over) for figures in _figures(run, "*")]
    if not (lines and is_over):
        lines.append("the drain is still at work")
    return "; ".join(lines)


def _figures(run: Path, hosts: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(run.glob(f"hosts/{hosts}/drain.json")):
        try:
            found.append(dict(json.loads(path.read_text())["summary"]))
        except (OSError, TypeError, ValueError, KeyError):
            continue  # not there yet, or damaged
    return found


def host_is_drained(run: Path, ranks: int, deadline: float) -> bool:
    """Wait until *ranks* processes of this host have been read to their end; return whether they were in time."""
    while sum(figures.get("processes", 0) for figures in _figures(run, f"{os.uname().nodename}-*")) < ranks:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def say_where(path: Path, drained: bool, starter: DrainStarter, *, is_over: bool) -> None:
    """Say what became of the spans of the run at *path*, or why that is not known."""
    if drained or path.exists():
        where = short_path(path)
        so_far = "" if is_over else "so far "
        guard.say(
            f"{so_far}{read_summary(path, is_over=is_over)}; in {where}; read them with: otel-dltrace report {where}"
        )
    elif starter.mode == "auto":
        trouble = starter.trouble() or "it has not answered yet"
        guard.say(f"the drain did not finish ({trouble}); if it is gone, `otel-dltrace recover` does its work")
