"""The folder of rings: what is wrong with one of them, or with this process for a while, costs no other."""

import errno
import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from otel_dltrace.export.files import write_whole
from otel_dltrace.export.rings.folder import RingFolder
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.errors import ConfigError, RingError
from otel_dltrace.record import launch, ring_file
from otel_dltrace.record.locks import is_listened_to, ring_bell, take_lock
from otel_dltrace.record.names import Names
from otel_dltrace.record.ring_file import make_ring_folder, version_of
from otel_dltrace.settings.config import Config

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
    assert capfd.readouterr().err.count("is not a ring that can be read") == 5


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


@pytest.mark.parametrize(("is_recovered", "again"), [(False, "it is tried again"), (True, "try it again")])
def test_a_folder_that_cannot_be_listed_is_not_empty(place, ring, monkeypatch, capfd, is_recovered, again):
    """Who recovers would else be told that nothing is left."""
    folder = RingFolder(Serving(place.rings, place.folder, orphans_only=is_recovered))

    def fail(_: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", fail)
        assert (taken(folder), folder.unread) == ([], {place.rings})
    said = f"otel_dltrace: {place.rings} cannot be read for now ([Errno 5] Input/output error): {again}\n"
    assert capfd.readouterr().err == said
    assert (taken(folder), folder.unread) == ([ring], set())


def test_two_versions_of_a_file_within_one_tick_of_the_clock_are_told_apart(tmp_path):
    """Who waits for a cursor would else wait for the one after it, which may never come."""
    path = tmp_path / "cursor"
    versions = [version_of(path)]
    for _ in range(2):
        write_whole(path, b"x")
        os.utime(path, ns=(1, 1))
        versions.append(version_of(path))

    assert len(set(versions)) == 3


STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of several users")


def a_folder(path: Path) -> None:
    """Make a folder of another user's, for all."""
    path.mkdir()
    path.chmod(0o777)
    os.chown(path, STRANGER, STRANGER)


def a_link(path: Path) -> None:
    """Make another user's link to a folder of ours."""
    mine = path.with_name("mine")
    mine.mkdir()
    path.symlink_to(mine)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def a_link_to_nothing(path: Path) -> None:
    """Make another user's link to what is not there."""
    path.symlink_to(path.with_name("nothing"))
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@as_root
@pytest.mark.parametrize("squat", [a_folder, a_link, a_link_to_nothing])
def test_what_another_user_has_made_under_our_folder_s_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squat: Callable[[Path], None]
) -> None:
    """Its owner could have us write and remove files elsewhere; a folder that somebody names may be shared."""
    path = tmp_path / "otel-dltrace-0"
    squat(path)
    monkeypatch.setattr(ring_file, "private_folder", lambda: path)
    whose = f"belongs to another user \\(uid {STRANGER}\\)"
    with pytest.raises(ConfigError, match=f"{path}' {whose}: name another folder on a tmpfs"):
        Config(ring_directory=str(path)).check_writable()
    if squat is not a_link_to_nothing:
        with pytest.raises(RingError, match=f"{path} {whose}; set OTEL_DLTRACE_RING_DIR to"):
            make_ring_folder(path)

    monkeypatch.undo()
    if squat is a_folder:
        Config(ring_directory=str(path)).check_writable()
        make_ring_folder(path)


def test_no_file_of_a_drain_is_a_link(tmp_path: Path) -> None:
    """In a folder that is shared somebody may have put links to our files under the names that a drain's will have."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for suffix in ("lock", "log", "bell"):
        (tmp_path / f"linked.{suffix}").symlink_to(precious)
    (tmp_path / "log.log").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        take_lock(tmp_path / "linked.lock")
    ring_bell(tmp_path / "linked.bell")
    assert not is_listened_to(tmp_path / "linked.bell")
    with pytest.raises(OSError, match="symbolic links"):
        launch.DrainStarter("log", tmp_path, "auto", {}, lambda _ring: None).start_process()

    assert precious.read_text() == "precious"


@as_root
def test_a_drain_of_a_name_reads_no_ring_of_another_user(place, ring: Path) -> None:
    """Such a ring says where its run is to be written. A drain that serves all, and `recover`, read it."""
    names = Names()
    names.read(ring.with_suffix(".names").read_bytes())
    os.chown(ring, STRANGER, STRANGER)
    assert taken(RingFolder(Serving(place.rings, place.folder, names.home["drain"]))) == []
    assert taken(RingFolder(Serving(place.rings, place.folder))) == [ring]

    os.chown(ring, os.geteuid(), -1)
    assert taken(RingFolder(Serving(place.rings, place.folder, names.home["drain"]))) == [ring]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(fcntl, "flock", id="a file system without locks"),
        pytest.param(Path, "stat", id="a disk that fails"),
    ],
)
def test_a_lock_that_cannot_be_had_is_not_another_s_nor_kept(tmp_path, monkeypatch, owner, name):
    """Taken for another's, no drain would ever be started; kept open, no other process could start one."""
    lock, before = tmp_path / "home.lock", descriptors()

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(OSError, match="No locks available"):
            take_lock(lock)
    assert descriptors() == before
    fd = take_lock(lock)
    assert fd is not None
    os.close(fd)
