"""Pods acted out as processes from their manifests: what a job recorded is in Jaeger, each span once."""

import copy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model.semconv import RANK_STEP, TRAIN_STEP
from tests.support.kube import overlay, pod_templates
from tests.support.paths import ROOT
from tests.support.pods import Around, Pod, Stage, stage
from tests.support.servers import Collector, Jaeger, attributes, collector, free_port, jaeger, spans_of, wait_until
from tests.support.torch_harness import read_ring

pytest.importorskip("torch")

KEEP_ALL = {"KEEP_PERCENT": "100", "DECISION_WAIT": "1s"}
"""What a user may set for the gateways: else a test would wait for 20 s, and see a tenth."""


def template_of(objects: Sequence[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """Return the first pod template of an object."""
    return pod_templates(next(o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)))[0]


@dataclass
class Namespace:
    """Everything but the jobs: a router and a gateway from the manifests, a Jaeger, and what stands for a Tempo."""

    stage: Stage
    router: str
    jaeger: Jaeger
    tempo: Collector
    injected: str

    def around(self, objects: Sequence[dict[str, Any]], places: dict[str, str], **more: Any) -> Around:
        """Return what a traced pod finds around it."""
        grpc, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        places = {"otel-gateway-router:4317": self.router, "127.0.0.1:4318": http, **places}
        places["/autoinstrumentation"] = self.injected
        return Around(objects, places, sidecars={"OTLP_GRPC_ENDPOINT": grpc, "OTLP_HTTP_ENDPOINT": http}, **more)

    def in_tempo(self, job: str) -> list[tuple[dict[str, Any], Any]]:
        """Return *job*'s spans, each with the attributes of its resource."""
        found = [(attributes(r.resource), r) for r in self.tempo.traces().resource_spans]
        mine = [(resource, r) for resource, r in found if resource["service.name"] == job]
        return [(resource, span) for resource, r in mine for scope in r.scope_spans for span in scope.spans]

    def spans_of(self, job: str, count: int) -> dict[str, tuple[dict[str, Any], Any]]:
        """Return the same by id, once there are *count*, and each is in Jaeger and in Tempo just once."""
        kept: list[tuple[dict[str, Any], Any]] = []
        read = 0

        def is_complete() -> bool:
            nonlocal kept, read
            size = self.tempo.spans_file.stat().st_size if self.tempo.spans_file.exists() else 0
            if size != read:
                kept, read = self.in_tempo(job), size
            return len(kept) >= count

        wait_until(is_complete, what=f"{count} spans of {job}")
        traces = Counter(span.trace_id.hex() for _, span in kept)
        shown = [span for trace, spans in traces.items() for span in spans_of(self.jaeger.trace(trace, spans))]
        once = Counter(span.span_id.hex() for _, span in kept)
        assert once == Counter(span.span_id.hex() for span in shown)
        assert set(once.values()) == {1}
        return {span.span_id.hex(): (resource, span) for resource, span in kept}


def names(spans: dict[str, tuple[dict[str, Any], Any]]) -> dict[str, str]:
    """Return the names of spans by id."""
    return {id_: span.name for id_, (_, span) in spans.items()}


@pytest.fixture(scope="module")
def injected() -> Iterator[str]:
    """What the injection image holds."""
    with tempfile.TemporaryDirectory(prefix="dltrace-inject-") as folder:
        Path(folder).chmod(0o755)
        collect = ROOT / "deploy" / "docker" / "inject" / "collect.py"
        subprocess.run([sys.executable, "-S", "-I", collect, folder], check=True)
        yield folder


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory, injected: str) -> Iterator[Namespace]:
    """A namespace without jobs."""
    objects = overlay("job")
    seen, kept = tmp_path_factory.mktemp("jaeger"), tmp_path_factory.mktemp("tempo")
    with jaeger(seen) as shown, collector(kept) as tempo, stage() as here:
        router, gateway, metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
        backends = {"jaeger:4317": shown.grpc.removeprefix("http://"), "tempo:4317": tempo.grpc.removeprefix("http://")}
        env = {"OTLP_GRPC_ENDPOINT": gateway, "PROMETHEUS_ENDPOINT": metrics, **own_port(), **KEEP_ALL}
        here.pod("gateway", template_of(objects, "Deployment", "otel-gateway"), Around(objects, backends, env))
        env = {"OTLP_GRPC_ENDPOINT": router, "GATEWAY_PORT": gateway.rpartition(":")[2], **own_port()}
        around = Around(objects, {"otel-gateway": "127.0.0.1"}, env)
        here.pod("router", template_of(objects, "Deployment", "otel-gateway-router"), around)
        yield Namespace(here, router, shown, tempo, injected)


def own_port() -> dict[str, str]:
    """Return where a collector shows its own metrics: here all pods are on one host."""
    return {"OWN_METRICS_PORT": str(free_port())}


def recorded(pods: Sequence[Pod]) -> dict[str, str]:
    """Return the names of the spans in the pods' run directories, by id."""
    runs = [run for pod in pods for run in pod.volumes["otel-dltrace-runs"].glob("dltrace-*")]
    batches = [batch for run in runs for batch in read_run(run)]
    return {
        f"{row['span_id']:016x}": batch.descriptors[row["descriptor"]].name for batch in batches for row in batch.rows
    }


def test_a_job_of_two_pods_trains_completes_and_is_in_jaeger(namespace):
    """The indexed Job, with a rank to a pod: sidecars end after the trainer; no span is missing, or there twice."""
    objects = overlay("job")
    template = template_of(objects, "Job", "train")
    places = {"train-0.train": "127.0.0.1", "29500": str(free_port())}
    wanted = {}
    for index in range(2):
        labels = {"job-name": "train", "controller-uid": "job-uid", "job-completion-index": str(index)}
        metadata = {"labels": {f"batch.kubernetes.io/{name}": value for name, value in labels.items()}}
        around = namespace.around(objects, places, args=["--epochs", "1", "--steps", "6"], metadata=metadata)
        around = replace(around, env={"PET_NPROC_PER_NODE": "1"})
        wanted[f"train-{index}"] = template, around
    pods = namespace.stage.run(wanted)

    assert [pod.wait() for pod in pods] == [0, 0], [pod.logs() for pod in pods]
    assert [pod.end_sidecars() for pod in pods] == [[0, 0], [0, 0]]

    expected = recorded(pods)
    assert expected, [pod.logs() for pod in pods]
    spans = namespace.spans_of("train", len(expected))
    roots = {id_: name for id_, name in names(spans).items() if id_ not in expected}
    assert names(spans) == expected | roots
    assert Counter(roots.values()) == {TRAIN_STEP: 6}
    says = ("k8s.pod.name", "k8s.node.name", "k8s.job.uid", "dl.job.id", "dl.rank")
    assert {tuple(resource[name] for name in says) for resource, _ in spans.values()} == {
        (f"train-{rank}", "node-a", "job-uid", "job-uid", rank) for rank in range(2)
    }


STUCK = """
import os, time, otel_dltrace, torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel

print(otel_dltrace.__file__)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64)).sum()
    dist.all_reduce(torch.ones(1))
    if step == 5:
        Path(os.environ["HOME"], f"stuck-{dist.get_rank()}").touch()
        time.sleep(600)
    loss.backward()
    optimizer.step()
"""


def test_a_trainer_killed_in_the_middle_of_a_step_leaves_all_it_recorded(namespace):
    """The PyTorchJob's master; SIGKILL to every process of the trainer: what the rings held is in Jaeger, once."""
    objects = copy.deepcopy(overlay("pytorchjob"))
    example = next(o for o in objects if o["metadata"]["name"] == "otel-dltrace-examples")
    example["data"]["train_ddp.py"] = STUCK
    operator = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    operator |= {"PET_MASTER_PORT": str(free_port())}
    metadata = {"labels": {"training.kubeflow.org/job-name": "killed", "training.kubeflow.org/replica-type": "master"}}
    around = namespace.around(objects, {}, env=operator, metadata=metadata)
    pod = namespace.stage.pod("killed-master-0", template_of(objects, "PyTorchJob", "train-pytorchjob"), around)
    stuck = [pod.volumes["tmp"] / f"stuck-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in stuck) or pod.main.poll() is not None, what="the sixth step")
    assert pod.main.poll() is None, pod.logs()
    rings = [read_ring(path) for path in pod.volumes["otel-dltrace-rings"].glob("*.ring")]

    pod.kill_main()
    assert pod.end_sidecars() == [0, 0], pod.logs()

    assert str(pod.volumes["otel-dltrace-inject"]) in pod.log("pytorch")
    held = Counter(name for ring in rings for name in {span.number: span.name for span in ring.records}.values())
    assert held[RANK_STEP] == 12, pod.logs()
    spans = namespace.spans_of("killed", held.total())
    assert Counter(names(spans).values()) - Counter({TRAIN_STEP: 6}) == held
    assert recorded([pod]).keys() <= spans.keys()


def by_operator(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod template as the OpenTelemetry Operator leaves it: its collector comes last."""
    template = copy.deepcopy(template_of(objects, "Job", "train-operator"))
    spec = next(o for o in objects if o["kind"] == "OpenTelemetryCollector")["spec"]
    container = {name: spec[name] for name in ("image", "volumeMounts", "securityContext", "lifecycle")}
    container |= {"name": "otc-container", "restartPolicy": "Always", "args": ["--config=env:OTEL_CONFIG"]}
    container["env"] = [*spec["env"], {"name": "OTEL_CONFIG", "value": yaml.safe_dump(spec["config"])}]
    container["startupProbe"] = {"httpGet": {"path": "/", "port": 13133}}
    template["spec"]["initContainers"].append(container)
    template["spec"]["volumes"] += spec["volumes"]
    return template


def test_under_the_operator_a_drain_is_through_before_the_collector_is_told_to_end(namespace):
    """The collector is the first to go, and waits: without being told the drain hands over all that was recorded."""
    objects = overlay("operator")
    template = by_operator(objects)
    assert template["spec"]["initContainers"][-1]["lifecycle"]["preStop"]["sleep"]["seconds"] >= 10
    env = {"PYTHONPATH": namespace.injected, "PET_MASTER_PORT": str(free_port())}
    metadata = {"labels": {"batch.kubernetes.io/job-name": "operated", "batch.kubernetes.io/controller-uid": "uid"}}
    around = namespace.around(objects, {}, args=["--epochs", "1", "--steps", "4"], env=env, metadata=metadata)
    pod = namespace.stage.pod("operated-0", template, around)

    assert pod.wait() == 0, pod.logs()
    rings = pod.volumes["otel-dltrace-rings"]
    wait_until(lambda: not list(rings.glob("*.ring")), what="the rings being read")
    expected = recorded([pod])
    spans = namespace.spans_of("operated", len(expected) + 4)
    assert pod.end_sidecars() == [0, 0], pod.logs()

    assert expected, pod.logs()
    roots = {id_: name for id_, name in names(spans).items() if id_ not in expected}
    assert names(spans) == expected | roots
    assert Counter(roots.values()) == {TRAIN_STEP: 4}


def test_push_pull_servers_and_workers_are_one_run(namespace):
    """StatefulSet and Job: servers end when their workers have, and their spans hang in the workers' traces."""
    secret = {
        "kind": "Secret",
        "metadata": {"name": "push-pull"},
        "stringData": {"token": "secret", "run": "0123456789abcdef"},
    }
    objects = [*overlay("statefulset"), secret]
    places = {"push-pull-0.push-pull:9000": f"127.0.0.1:{(port := free_port())}"}
    places |= {"push-pull-0.push-pull": "127.0.0.1", "9000": str(port)}
    wanted = {}
    for kind, name, label, args in (
        ("StatefulSet", "push-pull", "apps.kubernetes.io/pod-index", []),
        ("Job", "train-push-pull", "batch.kubernetes.io/job-completion-index", ["--epochs", "1", "--steps", "3"]),
    ):
        for index in range(2):
            around = namespace.around(objects, places, args=args, metadata={"labels": {label: str(index)}})
            sidecars = {**around.sidecars, "OTEL_DLTRACE_SPAN_BUDGET": "0"}  # else ranks take turns to go out in full
            around = replace(around, env={"OTEL_DLTRACE_LEVEL": "partition"}, sidecars=sidecars)
            wanted[f"{kind.lower()}-{index}"] = template_of(objects, kind, name), around
    pods = namespace.stage.run(wanted)
    servers, workers = pods[:2], pods[2:]

    assert [pod.wait() for pod in workers] == [0, 0], [pod.logs() for pod in workers]
    assert [pod.wait() for pod in servers] == [0, 0]
    assert [pod.end_sidecars() for pod in pods] == [[0, 0]] * 4

    expected = recorded(pods)
    served = recorded(servers)
    spans = namespace.spans_of("push-pull", len(expected))
    assert expected.items() <= names(spans).items()
    assert set(served.values()) == {"push", "pull"}, [pod.logs() for pod in servers]
    for id_ in served:
        _, span = spans[id_]
        resource, parent = spans[span.parent_span_id.hex()]
        assert (resource["dl.role"], parent.trace_id) == ("worker", span.trace_id)
