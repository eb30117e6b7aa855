"""The folder of rings: what is wrong with one of them, or with this process for a while, costs no other."""

import os
import resource
from pathlib import Path

import pytest

from otel_dltrace.export.files import write_whole
from otel_dltrace.export.ring_folder import RingFolder
from otel_dltrace.export.serving import Serving
from otel_dltrace.record.ring_file import version_of

RECORDS = """
    import otel_dltrace as d
    d.start()
    with d.step():
        pass
"""


@pytest.fixture
def ring(place) -> Path:
    """Give the ring of a process that is gone."""
    place.run(RECORDS, OTEL_DLTRACE_DRAIN="off")
    (path,) = place.rings.glob("*.ring")
    return path


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  -- its own is among them, each time


def taken(folder: RingFolder) -> list[Path]:
    """Return the rings that *folder* gives to read, and let go of them."""
    sources = [source for source, _ in folder.take(())]
    for source in sources:
        source.close()
    return [source.path for source in sources]


def test_rings_that_cannot_be_read_are_refused_and_leave_nothing_open(place, ring, capfd):
    """One of other bytes, an empty one, a pipe, two whose names are a folder and a pipe; another one is whole.

    Other pipes hold nobody up, either.
    """
    whole = ring.read_bytes()
    others = {"foreign": b"x" * len(whole), "empty": b"", "folder": whole, "names": whole}
    for name, content in others.items():
        (place.rings / f"{name}.ring").write_bytes(content)
    (place.rings / "folder.names").mkdir()
    os.mkfifo(place.rings / "names.names")
    for pipe in ("pipe.ring", ".unborn.new", f"{ring.stem}.cursor"):
        os.mkfifo(place.rings / pipe)
    before = descriptors()
    folder = RingFolder(Serving(place.rings, place.folder))

    folder.remove_unborn()
    assert taken(folder) == [ring]
    assert {path.stem for path, why in folder.refused.items() if why} == {*others, "pipe"}
    assert descriptors() == before
    assert capfd.readouterr().err.count("is no ring that can be read") == 5


def test_a_ring_is_tried_again_that_there_was_no_descriptor_for(place, ring, capfd):
    """Nothing is wrong with it: it is read when this process has fewer files open."""
    folder = RingFolder(Serving(place.rings, place.folder))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, before[1]))
    try:
        os.close(held.pop(0))  # one that is free, which the folder's listing needs, or the ring: not its names too
        assert taken(folder) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(held.pop())

    assert "Too many open files" in capfd.readouterr().err
    assert taken(folder) == [ring]


def test_two_versions_of_a_file_within_one_tick_of_the_clock_are_told_apart(tmp_path):
    """Who waits for a cursor would else wait for the one after it, which may never come."""
    path = tmp_path / "cursor"
    versions = [version_of(path)]
    for _ in range(2):
        write_whole(path, b"x")
        os.utime(path, ns=(1, 1))
        versions.append(version_of(path))

    assert len(set(versions)) == 3
