"""What became of a run's spans, as its drains have written it down."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from otel_dltrace.model.summary import summary_line, told_in
from otel_dltrace.record import guard
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.process_id import boot_id


def short_path(path: Path) -> str:
    """Return *path* relative to here, if that is shorter by more than a slash: in ``/``, a container's, it is not."""
    try:
        relative = os.path.relpath(path)
    except FileNotFoundError:  # here is nowhere: the working directory has been removed
        return str(path)
    return relative if len(relative) + 1 < len(str(path)) else str(path)


def read_summary(run: Path, hosts: str = "*", *, is_over: bool = True, left: str = "") -> str:
    """Return in one line what became of the spans of *run*, as far as its drains, which may be at work, have told.

    Of a run on several hosts each is named, and what *hosts* matches alone is told, if anything: a container's spans
    may be in the folder of another one that shares its rings.
    *left* is why they have left some in the rings.
    """
    is_over = is_over and not left
    of_all = _told(run)
    is_one_of = len({_host_of(told) for told in of_all}) > 1
    lines = [_line_of(told, is_over=is_over, is_one_of=is_one_of) for told in _told(run, hosts) or of_all]
    if not (lines and is_over):
        lines.append(left or "the drain is still at work")
    return "; ".join(lines)


def _line_of(told: dict[str, Any], *, is_over: bool, is_one_of: bool) -> str:
    """Return what a drain tells, of one of several hosts with its name; only its own says whether it has read all."""
    if not is_one_of:
        return summary_line(told["summary"], is_over=is_over)
    is_read = _is_drained([told], 1)
    line = f"{_host_of(told)}: {summary_line(told['summary'], is_over=is_over and is_read)}"
    return line if is_read or not is_over else f"{line} so far"


def _host_of(told: dict[str, Any]) -> str:
    """Return the host of whose processes a drain tells; "" where it knows none yet."""
    return next((str(one["host"]) for one in told["processes"] if isinstance(one, dict) and "host" in one), "")


def _here() -> str:
    """Return what matches this host's folders: another drain of it has one that is called after the first one's."""
    from otel_dltrace.export.rundir.host_folder import host_folder_name  # not at the start of every traced process

    return f"{host_folder_name(os.uname().nodename, boot_id().hex())}*"


def _told(run: Path, hosts: str = "*") -> list[dict[str, Any]]:
    found = []
    for path in sorted(run.glob(f"hosts/{hosts}/drain.json")):
        with suppress(OSError):  # gone by now
            found.append(told_in(path.read_text(errors="replace")))
    return [told for told in found if told is not None]


def host_is_drained(run: Path, ranks: int, deadline: float) -> bool:
    """Wait until this host's processes, *ranks* or more, have been read to their end; return whether they were in time.

    There are more where servers or other workers of a push_pull job are here as well.
    """
    here = _here()
    while not _is_drained(_told(run, here), ranks):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _is_drained(told: list[dict[str, Any]], ranks: int) -> bool:
    known = sum(len(one["processes"]) for one in told)
    ended: int = sum(one["summary"].get("processes", 0) for one in told)
    return ended >= max(ranks, known)


def is_first_here(run: Path, rank: int) -> bool:
    """Return whether no worker of this host has a lower *rank*, as far as its drains know.

    Where nobody has set LOCAL_RANK each is the host's first by the environment.
    """
    binds = [one.get("bind") for told in _told(run, _here()) for one in told["processes"] if isinstance(one, dict)]
    known = [bind for bind in binds if isinstance(bind, dict) and bind.get("role") == "worker"]
    return all(not isinstance(bind.get("rank"), int) or bind["rank"] >= rank for bind in known)


def how_to_read(run: Path) -> str:
    """Return how to read the spans of *run*, to be pasted into a shell."""
    from shlex import quote  # not at the start of every traced process

    return f"read them with: otel-dltrace report {quote(short_path(run))}"


def _recover(rings: Path) -> str:
    """Return what reads the *rings* that nobody drains, to be pasted into a shell."""
    from shlex import quote  # not at the start of every traced process

    return f"OTEL_DLTRACE_RING_DIR={quote(str(rings))} otel-dltrace recover"


def say_where(path: Path, drained: bool, starter: DrainStarter, *, is_over: bool) -> None:
    """Say what became of the spans of the run at *path*, or why that is not known."""
    where, read = short_path(path), how_to_read(path)
    if starter.is_shut_out:
        guard.say(f"{starter.lost}; the spans will be in {where}; {read}")
    elif starter.is_left_alone():
        cure = f"`{_recover(starter.rings)}`, or a drain started with --stay, puts them into {where}"
        why = "OTEL_DLTRACE_DRAIN=off" if starter.mode == "off" else "none could be started"
        guard.say(f"the spans wait in {starter.rings}, which no drain serves ({why}); {cure}; {read}")
    elif path.exists():
        so_far = "" if is_over else "so far "
        # Of a ring that has been read it is the figures that do not say so yet.
        why = (starter.lost or starter.trouble(f"the figures of {path} ")) if drained else starter.why_left()
        left = "" if is_over else why
        guard.say(f"{so_far}{read_summary(path, _here(), is_over=is_over, left=left)}; in {where}; {read}")
    elif drained:  # a ring that is gone has been read, or was somebody else's to remove
        guard.say(f"nothing is in {where}: it has been removed, or the rings in {starter.rings} were removed unread")
    elif starter.mode == "auto":
        trouble = starter.why_left() or "it has not answered yet"
        cure = "if it is gone, `otel-dltrace recover` finishes its work"
        guard.say(f"the drain did not finish ({trouble}; {cure}); the spans will be in {where}; {read}")
