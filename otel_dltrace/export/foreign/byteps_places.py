"""Whose BytePS's files are: what folders say of workers, and keys of servers. No two files are of one process."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from otel_dltrace.export.foreign.imported import Place
from otel_dltrace.formats.server_profile import Profile

_LOCAL_RANK = re.compile(r"[0-9]{1,3}")
"""A number with more digits is a date, or a job."""


class Told(NamedTuple):
    """Which server a profile's keys are of, and of how many there were, as far as they say so."""

    server: int
    servers: int


def worker_places(paths: Sequence[Path]) -> tuple[dict[Path, Place], list[str]]:
    """Return whose each ``comm.json`` is. The folder is the local rank; the folder around it stands for a machine."""
    nodes: dict[Path, dict[Path, int | None]] = {}
    for path in paths:
        local = _local_rank(path)
        nodes.setdefault(path.parent if local is None else path.parent.parent, {})[path] = local
    notes: list[str] = []
    unsaid = "its folder is not named after a local rank"
    machines = [_numbered(told, "local rank", unsaid, notes) for told in nodes.values()]
    if len(nodes) > 1:
        notes.append(
            "no file says which machine it comes from, so each folder counts as one: "
            + ", ".join(f"{name} is node {number}" for number, name in enumerate(_names(list(nodes))))
        )
    size = 1 + max((local for ranks in machines for local in ranks.values()), default=0)
    places = {
        path: Place("worker", number * size + local, f"node-{number}", local, number, "comm")
        for number, ranks in enumerate(machines)
        for path, local in ranks.items()
    }
    return places, notes


def server_places(profiles: Mapping[Path, Told]) -> tuple[dict[Path, Place], list[str]]:
    """Return whose each ``server_profile.json`` is."""
    notes: list[str] = []
    numbers = _numbered({path: told.server for path, told in profiles.items()}, "server", "", notes)
    return {path: Place("server", n, f"server-{n}", part="server") for path, n in numbers.items()}, notes


def told_by(profile: Profile) -> Told:
    """Return what *profile* says; of the first server the keys would be the same however many there are."""
    return Told(profile.server, profile.servers if profile.server else 0)


def _local_rank(path: Path) -> int | None:
    return int(path.parent.name) if _LOCAL_RANK.fullmatch(path.parent.name) else None


def _numbered(told: Mapping[Path, int | None], what: str, unsaid: str, notes: list[str]) -> dict[Path, int]:
    """Return a number for each path: the one that is *told*, unless another has it; what is left has the next free."""
    taken: dict[int, Path] = {}
    for path, number in told.items():
        if number is not None:
            taken.setdefault(number, path)
    for path, number in told.items():
        if number is not None and taken[number] == path:
            continue
        free = next(one for one in range(len(told)) if one not in taken)
        taken[free] = path
        why = unsaid if number is None else f"{taken[number]} is of {what} {number} as well"
        notes.append(f"{path}: {why}; it was taken to be {free}")
    return {path: number for number, path in taken.items()}


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the names of *folders*, or where those do not tell them apart, their paths."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
