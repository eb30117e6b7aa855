"""What an import is given may have no end, or be larger than there is room for: that is a sentence in each format."""

import gzip
import os
import re
import subprocess
import sys

import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.foreign import foreign_files, horovod_in

FORMATS = pytest.mark.parametrize("name", ["byteps", "bytescheduler", "horovod"])
ROOM = 3 << 30
IN_LITTLE = f"""
import resource
from otel_dltrace.cli.main import main

resource.setrlimit(resource.RLIMIT_AS, ({ROOM}, {ROOM}))
raise SystemExit(main())
"""


def imported(name, path, tmp_path, capsys):
    """Import what is at *path*; return the exit code, what was said, and whether a run was made."""
    code = main(["import", name, str(path), "-o", str(tmp_path / "RUN")])
    return code, capsys.readouterr().err, (tmp_path / "RUN").exists()


def with_little_memory(name, path, tmp_path):
    """Do the same in a process that may have little memory."""
    arguments = ["import", name, str(path), "-o", str(tmp_path / "RUN")]
    command = [sys.executable, "-c", IN_LITTLE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@FORMATS
def test_a_device_is_refused(name, tmp_path):
    """It would be read for ever."""
    done = with_little_memory(name, "/dev/zero", tmp_path)

    said = "otel-dltrace: /dev/zero is a device, which may have no end; give a file or a pipe\n"
    assert (done.returncode, done.stderr, (tmp_path / "RUN").exists()) == (2, said, False)


@FORMATS
def test_a_file_that_is_too_large_is_refused_before_it_is_read(name, tmp_path):
    """As a sparse one of a terabyte, which takes no room on the disk."""
    sparse = tmp_path / "comm.json"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    done = with_little_memory(name, sparse, tmp_path)

    most = "64" if name == "horovod" else r"\d+"
    said = rf"otel-dltrace: {sparse} is larger than {most} GiB, too large to be read; give only a part of it\n"
    assert (done.returncode, re.fullmatch(said, done.stderr) is not None) == (2, True), done.stderr


@FORMATS
def test_a_pipe_is_read_as_far_as_there_is_room(name, tmp_path, monkeypatch, capsys):
    """It ends when its writer does, which may be never."""
    monkeypatch.setattr(foreign_files, "room", lambda: 1 << 30)
    monkeypatch.setattr(horovod_in, "_MOST", 1 << 30)
    monkeypatch.setattr(foreign_files, "pieces_of", endless)
    monkeypatch.setattr(horovod_in, "pieces_of", endless)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"echo '[' > '{pipe}'"]) as writer:
        said = f"otel-dltrace: {pipe} is larger than 1 GiB, too large to be read; give only a part of it\n"
        assert imported(name, pipe, tmp_path, capsys) == (2, said, False)
        writer.wait()


def endless(file):
    """Yield pieces of a pipe whose writer goes on."""
    file.read()
    while True:
        yield bytes(1 << 26)


def test_of_a_gzip_no_more_is_unpacked_than_there_is_room(tmp_path, monkeypatch, capsys):
    """A megabyte may hold a gigabyte of zeros."""
    monkeypatch.setattr(horovod_in, "_MOST", 1 << 20)
    path = tmp_path / "timeline.json.gz"
    path.write_bytes(gzip.compress(b"[\n" + bytes(1 << 21)))

    said = f"otel-dltrace: {path} is larger than 0 GiB, too large to be read; give only a part of it\n"
    assert imported("horovod", path, tmp_path, capsys) == (2, said, False)


def test_memory_that_is_not_enough_is_one_sentence(tmp_path):
    """Of a file that is not too large for another machine."""
    path = tmp_path / "comm.json"
    path.touch()
    os.truncate(path, ROOM)
    done = with_little_memory("bytescheduler", path, tmp_path)

    said = "otel-dltrace: there is not enough memory for this; give it less at once, or run it where there is more\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_without_psutil_a_file_is_read(tmp_path, monkeypatch):
    """How much memory there is cannot be told then."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    (tmp_path / "any").write_bytes(b"read")

    assert foreign_files.read_foreign(tmp_path / "any") == b"read"
