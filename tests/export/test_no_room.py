"""A disk that is full for a while: nothing is lost, written twice, or left lying about."""

import subprocess
import sys

import numpy as np
import pytest

from otel_dltrace.export.drain import Drain
from otel_dltrace.export.run_folders import RunFolders
from otel_dltrace.export.rundir import writer as rundir
from otel_dltrace.export.rundir.compaction import compact
from otel_dltrace.export.rundir.reader import read_descriptors, read_run
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import PHASE
from tests.support.processes import room_for
from tests.support.run_files import DESCRIPTORS, ERRORS, a_process, a_writer, comparable, read_back, rows_of


@pytest.mark.parametrize("times", [1, 2, 3])
def test_names_that_come_when_there_is_room_again_are_found(tmp_path, times):
    """What failed while the names were copied is tried again, and leaves no file."""
    process = a_process()
    writer, rows = a_writer(tmp_path / "run", process), rows_of(process, range(3))
    many = [*DESCRIPTORS, *(Descriptor(PHASE, f"name {n}") for n in range(2000))]
    writer.append(process.nonce, rows[:4], many, ERRORS)
    more = [*many, Descriptor(PHASE, "new")]
    with room_for(1024):
        for _ in range(times):
            with pytest.raises(OSError, match="too large"):
                writer.append(process.nonce, rows[4:8], more, ERRORS)
    writer.append(process.nonce, rows[8:], more, ERRORS)
    writer.close()

    assert read_descriptors(writer.folder)[process.nonce] == more
    assert [path.name for path in writer.folder.glob(".desc*")] == []


def test_a_compaction_that_finds_no_room_leaves_the_segments_and_nothing_else(tmp_path):
    """It is tried again with the next ones."""
    process = a_process()
    writer, rows = a_writer(tmp_path / "run", process), rows_of(process, range(1000))
    writer.append(process.nonce, rows, DESCRIPTORS, ERRORS)
    writer.close_segment()
    before = sorted(path.name for path in writer.folder.iterdir())
    with room_for(4096), pytest.raises(OSError, match="too large"):
        compact(writer.folder, writer.number)

    assert sorted(path.name for path in writer.folder.iterdir()) == before
    assert compact(writer.folder, writer.number) == 1
    writer.close()


def test_a_segment_that_finds_no_room_for_its_end_has_its_rows_once(tmp_path, monkeypatch):
    """They are there: were it an error, the drain would write them again."""
    monkeypatch.setattr(rundir, "SEGMENT_BYTES", 0)
    process = a_process()
    rows = rows_of(process, range(400))
    a_writer(tmp_path / "whole", process).append(process.nonce, rows[:800], DESCRIPTORS, ERRORS)
    (whole,) = tmp_path.glob("whole/hosts/*/spans-*")
    writer = a_writer(tmp_path / "run", process)
    with room_for(whole.stat().st_size - 1):
        writer.append(process.nonce, rows[:800], DESCRIPTORS, ERRORS)
    writer.append(process.nonce, rows[800:], DESCRIPTORS, ERRORS)
    writer.close()

    assert read_back(tmp_path / "run") == comparable(rows, ERRORS)


def test_what_the_quota_took_is_counted_where_it_finds_no_room_for_more(tmp_path):
    """The first file is written anew; the second one stays."""
    process, folders = a_process(), RunFolders(0, lambda _: {})
    writer = folders.open(tmp_path / "run", process.bind, process, {})
    for steps in (range(10), range(10, 3010)):
        writer.append(process.nonce, rows_of(process, steps), DESCRIPTORS, ERRORS)
        writer.close_segment()
        compact(writer.folder, writer.number)
    with room_for(30_000):
        folders.keep_quota([tmp_path / "run"], lambda: None)
    writer.close()

    (batch,) = read_run(tmp_path / "run")
    assert len(batch) == 4 * 3010 - 20
    assert folders.totals[tmp_path / "run"]["dropped_by_quota"] == 20


TWICE_BOUND = """
    import sys
    import otel_dltrace as d
    from otel_dltrace.model.identity import Bind
    from otel_dltrace.record.tracer import live
    d.start()
    for generation in range(2):
        live.tracer.recorder.bind(Bind("job", f"{generation}.00", "demo", rank=0, world_size=1))
        for _ in range(3):
            with d.step():
                pass
    print("recorded", flush=True)
    sys.stdin.read()
"""


def test_what_one_generation_has_is_not_written_again_where_the_next_finds_no_room(place, monkeypatch):
    """Rows of both come in one batch, as after an elastic restart in one process."""
    env, pipe = place.env(OTEL_DLTRACE_DRAIN="off"), subprocess.PIPE
    program = subprocess.Popen([sys.executable, place.write(TWICE_BOUND)], env=env, stdin=pipe, stdout=pipe, text=True)
    assert program.stdout.readline() == "recorded\n"
    append, failures = RunWriter.append, iter([1, 2])

    def find_no_room_at_first(writer: RunWriter, nonce: int, rows: np.ndarray, *rest: object) -> None:
        if (rows["step"] > 2).any() and next(failures, 0):
            raise OSError(28, "No space left on device")
        append(writer, nonce, rows, *rest)

    monkeypatch.setattr(RunWriter, "append", find_no_room_at_first)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0, delay=0.0))
    for _ in range(4):
        drain.tick()
    assert next(failures, 0) == 0
    program.communicate()
    drain.run()

    runs = [read_run(run)[0] for run in place.runs()]
    assert sorted(sorted(batch["step"].tolist()) for batch in runs) == [[0, 1], [2, 3, 4, 5]]
