"""Metrics in the run directory: written through, read back whatever state they were left in."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from opentelemetry.semconv._incubating import metrics as semconv_metrics

from otel_dltrace.export.metrics import segments
from otel_dltrace.export.metrics.segments import METRICS, MetricSegments, metrics_bytes
from otel_dltrace.export.rundir.metric_reader import read_host_metrics, read_metrics
from otel_dltrace.model import metrics as m
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.metric_batch import HOST, NO_STEP, MetricBatch, Point, batch_of
from otel_dltrace.model.metrics import attributes_text
from tests.support.paths import ROOT
from tests.support.processes import room_for

USER, IDLE = (attributes_text({m.CPU_MODE: mode}) for mode in ("user", "idle"))
ROWS = [
    (30, NO_STEP, Point(m.SYSTEM_CPU_TIME, 1.5, USER)),
    (10, NO_STEP, Point(m.SYSTEM_CPU_TIME, 1.0, USER)),
    (20, 7, Point(m.DL_GC_PAUSE, 0.004, "", 1)),
    (10, NO_STEP, Point(m.SYSTEM_CPU_TIME, 4.0, IDLE)),
]


def told(batch: MetricBatch) -> list[tuple[int, int, Point]]:
    """Return a batch's values as the rows they were made of."""
    columns = (getattr(batch, name).tolist() for name in ("time", "step", "metric", "value", "attribute", "rank"))
    return [
        (time, step, Point(batch.metrics[metric], value, batch.attributes[attribute], rank))
        for time, step, metric, value, attribute, rank in zip(*columns, strict=True)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a host's folder in a run directory."""
    path = tmp_path / "run" / "hosts" / "node-0"
    path.mkdir(parents=True)
    return path


def test_a_folder_that_is_removed_and_made_anew_gets_what_comes(folder):
    """A file that is still open there has no name any more."""
    writer = MetricSegments(folder, 1 << 30)
    writer.append(batch_of(ROWS[:1]))
    shutil.rmtree(folder)
    folder.mkdir()
    writer.append(batch_of(ROWS[1:]))

    (batch,) = read_metrics(folder.parents[1])
    assert sorted(told(batch)) == sorted(ROWS[1:])


def test_what_is_written_is_read_back_in_order_of_time(folder):
    """Each append is readable at once, with texts that came up only later; nothing is closed."""
    writer = MetricSegments(folder, 1 << 30)
    seen = []
    for row in ROWS:
        writer.append(batch_of([row]))
        seen.append(len(read_host_metrics(folder)))

    (batch,) = read_metrics(folder.parents[1])
    assert (seen, batch.host) == ([1, 2, 3, 4], "node-0")
    assert sorted(told(batch)) == sorted(ROWS)
    assert batch.time.tolist() == [10, 10, 20, 30]


def test_every_text_of_attributes_is_json(folder):
    """Also of a metric that has none: DuckDB's and others' functions of JSON end at the first that is not."""
    MetricSegments(folder, 1 << 30).append(batch_of(ROWS))
    with pa.OSFile(str(folder / "metrics-00001.arrows")) as file:
        column = pa.ipc.open_stream(file).read_next_batch().column("attributes").to_pylist()

    assert [json.loads(text) for text in column] == [m.attributes_of(point.attributes) for _, _, point in ROWS]


def test_a_file_that_ends_in_half_a_batch_is_read_up_to_there(folder):
    """A drain was killed as it wrote; the next one writes another file."""
    writer = MetricSegments(folder, 1 << 30)
    for row in ROWS[:3]:
        writer.append(batch_of([row]))
    path = folder / "metrics-00001.arrows"
    path.write_bytes(path.read_bytes()[:-40])
    MetricSegments(folder, 1 << 30).append(batch_of(ROWS[3:]))

    assert sorted(told(read_host_metrics(folder))) == sorted([*ROWS[:2], ROWS[3]])
    assert sorted(p.name for p in folder.glob(METRICS)) == ["metrics-00001.arrows", "metrics-00002.arrows"]


@pytest.mark.parametrize("kept", [[], ROWS[:2]], ids=["nothing was written before", "some was"])
def test_a_full_disk_is_tried_again_only_after_a_while_and_no_torn_file_stays(kept, folder, monkeypatch):
    """What had been written is whole; what comes in the meantime is left out."""
    now = [100.0]
    monkeypatch.setattr(segments, "monotonic", lambda: now[0])
    writer = MetricSegments(folder, 1 << 30)
    for row in kept:
        writer.append(batch_of([row]))
    size = metrics_bytes(folder)
    with room_for(size + 100), pytest.raises(OSError, match="File too large"):
        writer.append(batch_of(ROWS * 100))
    writer.append(batch_of([ROWS[2]]))
    seen = [(len(list(folder.glob(METRICS))), metrics_bytes(folder))]
    now[0] += segments.RETRY_S
    writer.append(batch_of(ROWS[3:]))

    assert seen == [(bool(kept), size)]
    assert sorted(told(read_host_metrics(folder))) == sorted([*kept, *ROWS[3:]])


def test_what_two_drains_wrote_is_read_once(folder):
    """One was killed after it wrote and before it said so: the next one writes the same again."""
    for _ in range(2):
        writer = MetricSegments(folder, 1 << 30)
        writer.append(batch_of(ROWS))
        writer.close()

    assert len(read_host_metrics(folder)) == len(ROWS)


def test_values_are_chosen_by_metric_and_attributes(folder):
    """A series is a metric, a rank and the attributes."""
    batch = batch_of(ROWS)

    assert batch.of(m.SYSTEM_CPU_TIME, {m.CPU_MODE: "user"}).value.tolist() == [1.5, 1.0]
    assert len(batch.of(m.HW_POWER)) == len(batch.of(m.SYSTEM_CPU_TIME, {m.CPU_MODE: "nice"})) == 0
    assert [(metric, rank, text, series.value.tolist()) for metric, rank, text, series in batch.series()] == [
        (m.SYSTEM_CPU_TIME, HOST, USER, [1.0, 1.5]),
        (m.SYSTEM_CPU_TIME, HOST, IDLE, [4.0]),
        (m.DL_GC_PAUSE, 1, "", [0.004]),
    ]


def test_the_oldest_files_go_when_there_are_too_many_bytes(folder):
    """The newest stays, whatever it holds."""
    unlimited = MetricSegments(folder, 1)
    unlimited.append(batch_of(ROWS[:1]))
    size = metrics_bytes(folder)
    writer = MetricSegments(folder, 3 * size)
    for row in [*ROWS, *ROWS]:
        writer.append(batch_of([row] * 20))

    numbers = sorted(int(path.stem[-5:]) for path in folder.glob(METRICS))
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert numbers[0] > 1
    assert metrics_bytes(folder) <= 3 * size


def test_a_run_without_metrics_has_none(folder):
    """An empty list; and no run directory is an error as elsewhere."""
    assert read_metrics(folder.parents[1]) == []
    with pytest.raises(RunNotFoundError):
        read_metrics(folder)


def test_the_snippet_in_the_docs_runs(folder):
    """On a run directory with some metrics."""
    busy = [(time, NO_STEP, Point(m.SYSTEM_CPU_UTILIZATION, time / 100, USER)) for time in (10, 30)]
    MetricSegments(folder, 1 << 30).append(batch_of(busy))
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE | re.DOTALL
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(snippet.replace('"RUN"', repr(str(folder.parents[1]))), {})

    assert printed.getvalue() == "node-0 [10 30] [0.1 0.3]\n"


def test_names_and_units_are_those_of_the_semantic_conventions():
    """All that are not our own are in the installed package, with this unit and instrument."""
    package = Path(semconv_metrics.__path__[0])
    found = {}
    for path in package.glob("*_metrics.py"):
        for constant in re.split(r"^[A-Z_]+: Final = ", path.read_text(), flags=re.MULTILINE)[1:]:
            said = dict(re.findall(r"^(Instrument|Unit): (\S+)", constant, re.MULTILINE))
            found[constant.split('"')[1]] = (said.get("Unit"), said.get("Instrument"))
    ours = {name: (metric.unit, metric.instrument) for name, metric in m.METRICS.items() if not name.startswith("dl.")}

    assert ours == {name: found.get(name) for name in ours}
