"""A host's drain.json read back: who wrote in its folder, and what became of their spans."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from otel_dltrace.export.files import leave_room, read_object, write_json
from otel_dltrace.export.rundir.span_files import lasting_files
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.spans import Process
from otel_dltrace.model.time import Anchor

T = TypeVar("T", Bind, Anchor)


def read_drain(folder: Path) -> dict[str, Any]:
    """Return what the drain of a host's *folder* wrote down, without what is damaged in it; empty if all is."""
    told = read_object(folder / "drain.json")
    if not told:
        return {}
    summary, number = told.get("summary"), told.get("next_segment")
    if not isinstance(told.get("span_budget"), int):
        told.pop("span_budget", None)
    return {
        **told,
        "processes": [entry for entry in entries_of(told) if read_process(entry) is not None],
        "summary": summary if isinstance(summary, dict) else {},
        "next_segment": number if isinstance(number, int) else 1,
    }


def end_if_read(folder: Path) -> bool:
    """Write down that the drain of a host's *folder*, which is gone, has ended, if it had read all rings to their end.

    Return whether that was to be written: else it stands there, or rings are still to be read.
    """
    told = read_object(folder / "drain.json")
    if told.get("ended") is not False or not entries_of(told) or _unread(told):
        return False
    leave_room(folder / "drain.json")
    write_json(folder / "drain.json", {**told, "ended": True, "files": lasting_files(folder)})
    return True


def left_elsewhere(folder: Path, boot_id: str) -> tuple[str, int]:
    """Return of a host's *folder* whose drain is gone the host, and how many rings it has not read to their end.

    That is none where the host is that of *boot_id*, whose rings are at hand.
    """
    told = read_object(folder / "drain.json")
    known = [process for entry in entries_of(told) if (process := read_process(entry)) is not None]
    if told.get("ended") is not False or not known or known[0].boot_id == boot_id:
        return "", 0
    return known[0].host, _unread(told)


def _unread(told: Mapping[str, Any]) -> int:
    summary = told.get("summary")
    read = summary.get("processes", 0) if isinstance(summary, dict) else 0
    return max(0, len(entries_of(told)) - read)


def entries_of(told: Mapping[str, Any]) -> list[Any]:
    """Return what a drain.json says of processes, each entry damaged or not."""
    entries = told.get("processes")
    return entries if isinstance(entries, list) else []


def read_process(entry: Any) -> Process | None:
    """Return the process that *entry* of a drain.json tells of, None if that is damaged."""
    try:
        bind = read_bind(entry["bind"]) if entry["bind"] else None
        where = str(entry["host"]), str(entry["boot_id"]), int(entry["pid"])
        told = entry.get("resource", {}).items()
        resource = tuple((str(name), value) for name, value in told if _is_attribute(value))
        process = Process(int(entry["nonce"], 16), bind, *where, whole(Anchor(**entry["anchor"])), resource)
        return process if _fits(process.pid) and 0 <= process.nonce < 1 << 64 else None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return None


def read_bind(told: dict[str, Any]) -> Bind:
    """Return the bind that a JSON file has *told*.

    Raises:
        TypeError: A field is none, or the rank is no rank.
    """
    bind = whole(Bind.read(told))
    if not 0 <= bind.rank < 1 << 31:
        raise TypeError("rank")
    return bind


def _is_attribute(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and _fits(value))


def _fits(number: int) -> bool:
    """Return whether Arrow's columns and OTLP's attributes can hold *number*."""
    return -(1 << 63) <= number < 1 << 63


def whole(value: T) -> T:
    """Return *value*, each of whose fields is of its type, and a number of a size that can be reckoned with.

    Raises:
        TypeError: One is not.
    """
    for field in fields(value):
        held = getattr(value, field.name)
        if not isinstance(held, field.type) or (isinstance(held, int) and not _fits(held)):  # type: ignore[arg-type]  # plain types all
            raise TypeError(field.name)
    return value
