"""Which of BytePS's files lie where somebody points: their names and folders say whose they are."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from otel_dltrace.formats.byteps_kind import is_comm, is_server_profile, kind_by_name
from otel_dltrace.formats.others import HEAD
from otel_dltrace.model.errors import TraceFormatError

_MOST_NAMED = 4
_RENAMED = "was not read: it is a worker's file, but not called comm.json; to read it too, give it by name"
_DIGITS = re.compile(r"(\d+)")


def find(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the files at *paths*, each once, by the names they have there: a link's target may be named otherwise.

    In a directory a worker's timeline is one by its name, since copies may lie beside it; those that have another name
    are told, a sentence each.

    Raises:
        TraceFormatError: There are none in a directory.
    """
    found: dict[Path, Path] = {}
    renamed: dict[Path, str] = {}
    for path in paths:
        inside = [one for one in _files(path) if one.is_file() and not _is_copy(one)] if path.is_dir() else []
        is_wanted = {one: _is_bytepss(one) for one in inside}
        wanted = [one for one in inside if is_wanted[one]] if path.is_dir() else [path]
        told = {one.resolve(): f"{one} {_RENAMED}" for one in inside if not is_wanted[one] and is_comm(_head(one))}
        if not wanted:
            why = "".join(f"; {sentence}" for sentence in [*told.values()][:_MOST_NAMED])
            raise TraceFormatError(f"{path} holds no comm.json, server_profile.json or van profile of BytePS{why}")
        renamed |= told
        for one in wanted:
            found.setdefault(one.resolve(), _absolute(one))
    return sorted(found.values(), key=natural), [told for real, told in renamed.items() if real not in found]


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below *folder*. Links to folders are followed, last, and none is entered twice: they may loop."""
    waiting, seen = [folder], set[Path]()
    for top in waiting:  # which grows
        for name, folders, files in os.walk(top):
            here = Path(name)
            if (real := here.resolve()) in seen:
                folders.clear()
                continue
            seen.add(real)
            waiting += sorted(link for inner in folders if (link := here / inner).is_symlink())
            yield from (here / file for file in files)


def _is_bytepss(path: Path) -> bool:
    """Return whether *path* is one of BytePS's files: a server's profile may have any name, and its begin tells."""
    return kind_by_name(path.name) is not None or is_server_profile(_head(path))


def _head(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        return file.read(HEAD)
    return b""  # what is not ours to read is not BytePS's


def _is_copy(path: Path) -> bool:
    """Return whether *path* is what `gzip --keep` has made of the file beside it."""
    return path.suffix == ".gz" and path.with_suffix("").is_file()


def _absolute(path: Path) -> Path:
    """Return *path* from the root, without `..` unless that is behind a link and leads elsewhere."""
    plain = Path(os.path.normpath(path.absolute()))
    return plain if plain.resolve() == path.resolve() else path.absolute()


def natural(path: Path) -> list[tuple[int, str]]:
    """Return what orders paths as people do: worker2 before worker10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(str(path))]
