"""What a person finds in a real Jaeger, asked over its HTTP query API: a job of two ranks and a server, and DDP."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from otel_dltrace.export.outgoing.as_sent import as_sent
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP, root_id, trace_id
from otel_dltrace.model.spans import SpanBatch
from tests.support import servers
from tests.support.collector_traffic import MS, STEPS, push_pull_job, request, send, span
from tests.support.paths import ROOT
from tests.support.processes import Place, a_place

STEP = 3
DDP_JOB = "program"


@dataclass
class Seen:
    """A Jaeger, and what the drain of each job wrote to disk of what it sent there."""

    jaeger: servers.Jaeger
    jobs: dict[str, list[SpanBatch]]

    def ids(self, job: str, step: int) -> list[str]:
        """Return the ids of the spans that *job* sent of *step*, its root among them."""
        return sorted(f"{i:016x}" for batch in self.jobs[job] for i in batch["span_id"][batch["step"] == step].tolist())

    def trace_id(self, job: str, step: int) -> str:
        """Return the id of a step's trace, from what is on disk alone."""
        return f"{trace_id(self.jobs[job][0].process.bind, step):032x}"

    def find(self, job: str, **asked: str) -> set[str]:
        """Return the ids of the traces that a search finds."""
        answer = self.jaeger.get(f"/api/traces?{urlencode({'service': job, 'limit': 100, 'lookback': '1h', **asked})}")
        return {trace["traceID"] for trace in answer["data"]}

    def tagged(self, job: str, **tags: str) -> set[str]:
        """Return the ids of the traces with a span that has all *tags*; a dot is ``__``."""
        return self.find(job, tags=json.dumps({name.replace("__", "."): value for name, value in tags.items()}))


def run_ddp(place: Place, **env: str) -> None:
    """Run the example on two ranks."""
    text = (ROOT / "examples" / "train_ddp.py").read_text()
    done = place.torchrun(text, "--epochs", "1", "--steps", "8", "--width", "64", OTEL_DLTRACE="1", **env)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Give a Jaeger that a push_pull job was sent to: two ranks and a server."""
    with servers.jaeger(tmp_path_factory.mktemp("jaeger")) as jaeger:
        yield Seen(jaeger, {"job": sent_by(push_pull_job, jaeger)})


def sent_by(job: Any, jaeger: servers.Jaeger) -> list[SpanBatch]:
    """Run *job*; return what it sent, once Jaeger has it."""
    with tempfile.TemporaryDirectory() as folder, a_place(Path(folder)) as place:
        job(place, OTEL_EXPORTER_OTLP_ENDPOINT=jaeger.http)
        place.deliver(OTEL_EXPORTER_OTLP_ENDPOINT=jaeger.http)
        batches = list(as_sent(place.runs()))
    bind = batches[0].process.bind
    for step in sorted({int(step) for batch in batches for step in batch["step"] if step != NO_STEP}):
        count = sum(int((batch["step"] == step).sum()) for batch in batches)
        jaeger.trace(f"{trace_id(bind, step):032x}", count)
    return batches


def test_the_job_is_one_service(seen):
    """Ranks and servers of a job share its name; Jaeger knows no other."""
    assert seen.jaeger.get("/api/services")["data"] == ["job"]


def test_operations_are_few_whatever_the_ranks_keys_and_steps(seen):
    """Names hold no number, so that the list stays short and can be chosen from."""
    operations = seen.jaeger.get("/api/services/job/operations")["data"]

    assert set(operations) == {batch.descriptors[d].name for batch in seen.jobs["job"] for d in batch["descriptor"]}
    assert {s.TRAIN_STEP, s.RANK_STEP, s.PUSH_PULL, "PUSH", "PULL", s.PUSH, s.PULL} <= set(operations)


def test_a_step_is_found_by_its_derived_id(seen):
    """Every span of both ranks and of the server is there, once."""
    found = servers.spans_of(seen.jaeger.trace(seen.trace_id("job", STEP), len(seen.ids("job", STEP))))

    assert sorted(span.span_id.hex() for span in found) == seen.ids("job", STEP)
    assert Counter(span.name for span in found)[s.RANK_STEP] == 2


def check_the_tree(spans: list[dict[str, Any]], root: str) -> None:
    """Every span's parent is there, all hang under *root*, and Jaeger warns of none."""
    parents = {span["spanID"]: [r["spanID"] for r in span["references"]] for span in spans}
    orphans = {child: above for child, above in parents.items() if not set(above) <= set(parents)}
    assert orphans == {}
    assert [child for child, above in parents.items() if not above] == [root]
    assert {span["spanID"]: span["warnings"] for span in spans if span["warnings"]} == {}


def shown(seen: Seen, job: str, step: int) -> dict[str, Any]:
    """Return the trace of a step as Jaeger's own page gets it."""
    answer = seen.jaeger.get(f"/api/traces/{seen.trace_id(job, step)}")
    assert answer["errors"] is None
    (trace,) = answer["data"]
    assert trace["warnings"] is None
    return dict(trace)


def root_of(seen: Seen, job: str, step: int) -> str:
    return f"{root_id(seen.jobs[job][0].process.bind, step):016x}"


@pytest.mark.parametrize("step", range(STEPS))
def test_a_step_is_one_tree_without_a_warning(seen, step):
    """On one host: workers' spans and the server's, every parent resolved, no clock was suspected."""
    check_the_tree(shown(seen, "job", step)["spans"], root_of(seen, "job", step))


def test_each_rank_is_a_process_with_its_attributes(seen):
    """Numbers are numbers, and who is who stands with the process."""
    processes = shown(seen, "job", STEP)["processes"].values()
    tags = [{tag["key"]: tag["value"] for tag in process["tags"]} for process in processes]

    assert sorted((t[s.DL_ROLE], t[s.DL_RANK]) for t in tags) == [("server", 0), ("worker", 0), ("worker", 1)]
    assert len({t[s.SERVICE_INSTANCE_ID] for t in tags}) == 3
    assert len({t[s.HOST_ID] for t in tags}) == 1


def steps_with(seen: Seen, **wanted: Any) -> set[str]:
    """Return the ids of the traces of the steps that have a row with these columns."""
    steps = set()
    for batch in seen.jobs["job"]:
        for i, row in enumerate(batch.rows):
            columns = {"queue_type": batch.descriptor_of(i).queue_type, "rank": batch.process.bind.rank}
            key = batch.keys[i] << 16 | int(row["partition"])
            if all({**columns, "key": key}[name] == value for name, value in wanted.items()):
                steps.add(int(row["step"]))
    return {seen.trace_id("job", step) for step in steps if step != NO_STEP}


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        pytest.param({"dl__rank": "1"}, {"rank": 1}, id="rank"),
        pytest.param({"dl__rank": "7"}, {"rank": 7}, id="no such rank"),
        pytest.param({"dl__key": "1"}, {"key": 1}, id="key"),
        pytest.param({"dl__key": "99"}, {"key": 99}, id="no such key"),
        pytest.param({"dl__queue__type": "PUSH"}, {"queue_type": "PUSH"}, id="queue type"),
        pytest.param({"dl__queue__type": "NEVER"}, {"queue_type": "NEVER"}, id="no such queue type"),
        pytest.param(
            {"dl__rank": "1", "dl__key": "1", "dl__queue__type": "PULL"},
            {"rank": 1, "key": 1, "queue_type": "PULL"},
            id="all three on one span",
        ),
        pytest.param(
            {"dl__rank": "1", "dl__key": "1", "dl__queue__type": "NEVER"},
            {"rank": 1, "key": 1, "queue_type": "NEVER"},
            id="two of three",
        ),
    ],
)
def test_steps_are_found_by_tags(seen, tags, wanted):
    """A search finds the steps that have such a span, and no others."""
    assert seen.tagged("job", **tags) == steps_with(seen, **wanted)


def test_a_step_is_found_by_its_number(seen):
    """`dl.step` leads to one trace."""
    assert seen.tagged("job", dl__step=str(STEP)) == {seen.trace_id("job", STEP)}
    assert seen.find("job", operation=s.TRAIN_STEP) == {seen.trace_id("job", step) for step in range(STEPS)}


def test_an_unknown_id_is_not_there(seen):
    """A step that never was."""
    assert seen.jaeger.get(f"/api/traces/{seen.trace_id('job', 999)}") is None


def test_ddp_is_one_tree_without_a_warning(tmp_path):
    """Two ranks under torchrun: a step's spans once, under one root, resolved and not suspected."""
    pytest.importorskip("torch")
    with servers.jaeger(tmp_path) as jaeger:
        ddp = Seen(jaeger, {DDP_JOB: sent_by(run_ddp, jaeger)})
        trace = shown(ddp, DDP_JOB, STEP)

    assert sorted(span["spanID"] for span in trace["spans"]) == ddp.ids(DDP_JOB, STEP)
    assert len(trace["processes"]) == 2
    check_the_tree(trace["spans"], root_of(ddp, DDP_JOB, STEP))


def test_a_span_that_came_twice_is_shown_once(tmp_path):
    """As after a kill on the way: delivery is at least once."""
    with servers.jaeger(tmp_path) as jaeger:
        root, child = span("train.step", 1), span("forward", 1)
        child.parent_span_id = root.span_id
        send(jaeger.grpc, [request([root, child]), request([child])], tmp_path)
        jaeger.trace(root.trace_id.hex(), 2)
        (trace,) = jaeger.get(f"/api/traces/{root.trace_id.hex()}")["data"]

    assert sorted(it["spanID"] for it in trace["spans"]) == sorted(it.span_id.hex() for it in (root, child))
    assert [it["warnings"] for it in trace["spans"]] == [None, None]


def test_across_hosts_times_stay_as_they_were(tmp_path):
    """The root covers rank 0's host: a rank elsewhere hangs over its end; Jaeger may say so, and moves nothing."""
    extents = {"train.step": (0, 5), "here": (0, 5), "longer": (0, 7), "later": (2, 6)}
    with servers.jaeger(tmp_path) as jaeger:
        root, *below = (span(name, 1, start * MS, end * MS) for name, (start, end) in extents.items())
        for child in below:
            child.parent_span_id = root.span_id
        send(jaeger.grpc, [request([root, below[0]]), request(below[1:], 1, "node-1")], tmp_path)
        jaeger.trace(root.trace_id.hex(), 4)
        found = jaeger.get(f"/api/traces/{root.trace_id.hex()}")["data"][0]["spans"]

    first = min(it["startTime"] for it in found)
    starts = {it["operationName"]: (it["startTime"] - first) / 1000 for it in found}
    assert {
        it["operationName"]: (starts[it["operationName"]], starts[it["operationName"]] + it["duration"] / 1000)
        for it in found
    } == extents
    warned = {it["operationName"]: it["warnings"] for it in found if it["warnings"]}
    assert list(warned) == ["later"]
    assert "clock skew adjustment disabled" in warned["later"][0]
