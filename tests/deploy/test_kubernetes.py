"""The manifests of ``deploy/kubernetes``: a real API server takes them, and they say what they must."""

import copy
import os
import re
import runpy
import shutil
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_dltrace._version import __version__
from tests.support.kube import KUBERNETES, OVERLAYS, Cluster, cluster, objects, overlay, pod_templates, rendered
from tests.support.paths import ROOT

KINDS = {
    "job": "Job",
    "jobset": "JobSet",
    "mpijob": "MPIJob",
    "operator": "OpenTelemetryCollector",
    "pytorchjob": "PyTorchJob",
    "statefulset": "StatefulSet",
    "trainjob": "TrainingRuntime",
}
"""By overlay a kind of which the API server must then have one."""
HARDENED = {
    "runAsNonRoot": True,
    "runAsUser": 64201,
    "runAsGroup": 64201,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
REFERENCE = re.compile(r"\$\(([A-Z_]+)\)")
KUBERNETES_VERSION = "1.33"
READ = [
    ("watch", "pods"),
    ("list", "namespaces"),
    ("get", "nodes"),
    ("list", "replicasets.apps"),
    ("watch", "jobs.batch"),
]
NOT_RESTRICTED = {"mpijob"}
"""Their trainers need more than Pod Security's `restricted` allows: sshd becomes another user."""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One API server for all tests here."""
    with cluster(tmp_path_factory.mktemp("kube")) as found:
        yield found


def in_namespace(name: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *found* moved to the namespace *name*: overlays have names in common."""
    moved = copy.deepcopy(found)
    for item in moved:
        if item["kind"] == "Namespace":
            item["metadata"]["name"] = name
        elif "namespace" in item["metadata"]:
            item["metadata"]["namespace"] = name
    return moved


def traced(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pod templates that have a drain."""
    has_drain = [
        t for t in pod_templates(found) if "otel-dltrace-drain" in map(_name, t["spec"].get("initContainers", []))
    ]
    assert has_drain
    return has_drain


def _name(container: dict[str, Any]) -> str:
    return str(container["name"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_api_server_takes_the_overlay(api, name):
    """Server-side apply with strict field validation, dry and for real; what is kept has every field that we wrote."""
    everything = in_namespace(name, overlay(name))
    api.do("apply", "--server-side", "-f", "-", given=[o for o in everything if o["kind"] == "Namespace"])
    api.do("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", given=everything)
    api.do("apply", "--server-side", "--validate=strict", "-f", "-", given=everything)

    kept = api.get(name, KINDS[name])
    assert len(kept) == 1
    wanted = next(o for o in everything if o["kind"] == KINDS[name])
    assert missing(wanted["spec"], kept[0]["spec"]) == []


def test_one_command_applies_an_overlay(api):
    """As the docs say it, with nothing there before: the namespace and the runtime come before what needs them."""
    lines = api.do("apply", "-k", str(KUBERNETES / "overlays" / "trainjob")).splitlines()
    assert {line.rpartition(" ")[2] for line in lines} == {"created"}
    assert lines[0] == "namespace/otel-dltrace created"
    assert len(lines) == len(overlay("trainjob"))


def _without_a_volume(item: dict[str, Any]) -> None:
    pod_templates(item)[0]["spec"]["volumes"].pop()


def _with_a_field_unknown(item: dict[str, Any]) -> None:
    traced([item])[0]["spec"]["initContainers"][-1]["restartPolitics"] = "Always"


@pytest.mark.parametrize(
    ("name", "kind", "spoil", "complaint"),
    [
        pytest.param("job", "Job", _without_a_volume, "Not found", id="Job that mounts what is not there"),
        pytest.param("pytorchjob", "PyTorchJob", _with_a_field_unknown, "restartPolitics", id="PyTorchJob"),
        pytest.param("mpijob", "MPIJob", _with_a_field_unknown, "restartPolitics", id="MPIJob"),
        pytest.param("trainjob", "TrainingRuntime", _with_a_field_unknown, "restartPolitics", id="TrainingRuntime"),
        pytest.param("jobset", "JobSet", _with_a_field_unknown, "restartPolitics", id="JobSet"),
    ],
)
def test_the_api_server_would_refuse_a_mistake(api, name, kind, spoil, complaint):
    """What it takes it has looked at: a fault that we plant is found."""
    item = copy.deepcopy(next(o for o in overlay(name) if o["kind"] == kind))
    item["metadata"]["namespace"] = "default"
    spoil(item)
    refused = api.kubectl("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", given=[item])
    assert refused.returncode == 1
    assert complaint in refused.stderr


def missing(wanted: Any, kept: Any, where: str = "spec") -> list[str]:
    """Return where *kept* lacks or changes something of *wanted*; quantities may be written otherwise."""
    if isinstance(wanted, dict) and isinstance(kept, dict):
        return [path for key, value in wanted.items() for path in missing(value, kept.get(key), f"{where}.{key}")]
    if isinstance(wanted, list) and isinstance(kept, list) and len(wanted) == len(kept):
        return [
            path for i, pair in enumerate(zip(wanted, kept, strict=True)) for path in missing(*pair, f"{where}.{i}")
        ]
    return [] if wanted == kept or ".resources." in where else [f"{where}: {wanted!r} became {kept!r}"]


def test_every_pod_is_one_that_the_api_server_lets_in(api):
    """Custom kinds do not check the pods in them: so each template becomes a pod, all but MPI's under `restricted`."""
    for name in OVERLAYS:
        level = "baseline" if name in NOT_RESTRICTED else "restricted"
        space = f"{level}-pods"
        labels = {"pod-security.kubernetes.io/enforce": level}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space, "labels": labels}}
        pods = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**template["metadata"], "name": f"{name}-{i}", "namespace": space},
                "spec": template["spec"],
            }
            for i, template in enumerate(pod_templates(overlay(name)))
        ]
        api.do("apply", "--server-side", "-f", "-", given=[namespace])
        api.do("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", given=pods)


def test_a_right_is_asked_for_only_with_the_component_that_uses_it(api, tmp_path):
    """The overlays bring no role; k8s-attributes brings one, for the gateways: what they read they may, no more."""
    kinds = {o["kind"] for name in OVERLAYS for o in overlay(name)}
    assert {kind for kind in kinds if "Role" in kind} == set()
    assert {t["spec"].get("automountServiceAccountToken") for n in OVERLAYS for t in pod_templates(overlay(n))} == {
        False
    }

    with_rights = own(tmp_path, resources=["base"], components=["components/k8s-attributes"])
    found = in_namespace("rights", objects(with_rights))
    assert {o["kind"] for o in found} - kinds == {"ClusterRole", "ClusterRoleBinding"}
    api.do("apply", "--server-side", "-f", "-", given=[o for o in found if o["kind"] == "Namespace"])
    api.do("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", given=found)
    api.do("apply", "--server-side", "-f", "-", given=[o for o in found if "Role" in o["kind"]])
    assert [allowed(api, "otel-gateway-reader", *asked) for asked in READ] == ["yes"] * len(READ)
    assert allowed(api, "otel-gateway-reader", "get", "secrets") == "no"
    assert allowed(api, "otel-gateway", "list", "pods") == "no"
    (gateway,) = (o for o in found if (o["kind"], o["metadata"]["name"]) == ("Deployment", "otel-gateway"))
    assert gateway["spec"]["template"]["spec"]["automountServiceAccountToken"] is True


@pytest.mark.parametrize(
    ("users", "namespace"),
    [pytest.param({}, "otel-dltrace", id="ours"), pytest.param({"namespace": "team-a"}, "team-a", id="the user's")],
)
def test_the_account_of_the_gateways_has_the_rights_in_any_namespace(tmp_path, users, namespace):
    """Account, pods and binding move together: else the account is not there, or may not read pods."""
    found = objects(own(tmp_path, ["overlays/job"], ["components/k8s-attributes"], **users))

    (binding,) = (o for o in found if o["kind"] == "ClusterRoleBinding")
    (gateway,) = (o for o in found if (o["kind"], o["metadata"]["name"]) == ("Deployment", "otel-gateway"))
    account = {"kind": "ServiceAccount", "name": gateway["spec"]["template"]["spec"]["serviceAccountName"]}
    assert gateway["metadata"]["namespace"] == namespace
    assert binding["subjects"] == [{**account, "namespace": namespace}]
    accounts = [o["metadata"] for o in found if o["kind"] == "ServiceAccount"]
    assert (account["name"], namespace) in [(each["name"], each.get("namespace")) for each in accounts]


def allowed(api: Cluster, account: str, verb: str, resource: str) -> str:
    """Return whether a service account may do that in every namespace: yes or no."""
    account = f"--as=system:serviceaccount:otel-dltrace:{account}"
    return api.kubectl("auth", "can-i", verb, resource, account, "--all-namespaces").stdout.strip()


def own(folder: Path, resources: Sequence[str], components: Sequence[str] = (), **more: Any) -> Path:
    """Write a user's own kustomization, somewhere beside the checkout; return its folder."""

    def there(names: Sequence[str]) -> list[str]:
        return [os.path.relpath(KUBERNETES / name, folder.resolve()) for name in names]

    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    text = {**kind, "resources": there(resources), "components": there(components), **more}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder


def changed_overlay(folder: Path, change: Callable[[dict[str, Any]], None], name: str = "job") -> Path:
    """Copy what the overlay *name* is made of, with *change* made to its kustomization; return its folder."""
    for part in ("deploy/kubernetes", "collector-config", "examples"):
        shutil.copytree(ROOT / part, folder / part)
    found = folder / "deploy" / "kubernetes" / "overlays" / name
    written = yaml.safe_load((found / "kustomization.yaml").read_text())
    change(written)
    (found / "kustomization.yaml").write_text(yaml.safe_dump(written))
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_traced_pod_has_hardened_native_sidecars_beside_its_trainer(name):
    """Collector, then drain, which ends first; each has resources, no rights; the trainer waits for the drain alone."""
    for template in traced(overlay(name)):
        spec = template["spec"]
        sidecars = [c for c in spec["initContainers"] if c.get("restartPolicy") == "Always"]
        brought_by_operator = name == "operator"
        assert [c["name"] for c in sidecars] == ["otel-collector", "otel-dltrace-drain"][brought_by_operator:]
        for container in sidecars:
            assert ("startupProbe" in container) == (container["name"] == "otel-dltrace-drain")
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
        for container in spec["initContainers"]:
            assert container["securityContext"] == HARDENED
        assert spec["securityContext"]["fsGroup"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["otel-dltrace-rings"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
        for container in (sidecars[-1], spec["containers"][0]):
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            env = {e["name"]: e.get("value") for e in container["env"]}
            assert mounts[env["OTEL_DLTRACE_RING_DIR"]] == "otel-dltrace-rings"
            assert mounts[env["OTEL_DLTRACE_DIR"]] == "otel-dltrace-runs"


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_a_pod_refers_to_is_there(name):
    """Volumes, ConfigMaps, accounts; each $(NAME) stands after NAME; Go's limit is 80 % of the container's."""
    found = overlay(name)
    names = {(o["kind"], o["metadata"]["name"]) for o in found}
    for template in pod_templates(found):
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        maps = {v["configMap"]["name"] for v in spec.get("volumes", []) if "configMap" in v}
        assert {("ConfigMap", name) for name in maps} <= names
        assert ("ServiceAccount", spec.get("serviceAccountName", "traced-pod")) in names
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            known = [variable["name"] for variable in container.get("env", [])]
            for i, variable in enumerate(container.get("env", [])):
                assert set(REFERENCE.findall(variable.get("value", ""))) <= set(known[:i])
            words = [*container.get("command", []), *container.get("args", [])]
            assert {name for word in words for name in REFERENCE.findall(word)} <= set(known)
            values = {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}
            if "GOMEMLIMIT" in values:
                limit = mebibytes(container["resources"]["limits"]["memory"])
                assert int(values["GOMEMLIMIT"].removesuffix("MiB")) == round(0.8 * limit)
                assert int(values["MEMORY_LIMIT_MIB"]) == limit // 2


def mebibytes(quantity: str) -> int:
    """Return a quantity as Kubernetes writes it in MiB."""
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_job_is_applied_after_what_it_needs(name):
    """The namespace is first, the job last, but for the example's program, for which a kubelet waits."""
    kinds = [item["kind"] for item in overlay(name) if item["metadata"]["name"] != "otel-dltrace-examples"]
    assert kinds[0] == "Namespace"
    assert kinds[-1] == {"trainjob": "TrainJob", "operator": "Job", "statefulset": "Job"}.get(name, KINDS[name])


def test_overlays_can_share_a_namespace():
    """What two of them name is alike in both, and each job, after which operators name what they make, has its own."""
    everything = [item for name in OVERLAYS for item in overlay(name)]
    named = {(item["kind"], item["metadata"]["name"]): item for item in everything}
    assert [item for item in everything if item != named[item["kind"], item["metadata"]["name"]]] == []
    kinds = {*KINDS.values(), "TrainJob", "Job"} - {"OpenTelemetryCollector", "TrainingRuntime"}
    jobs = [name for kind, name in named if kind in kinds]
    assert sorted(set(jobs)) == sorted(jobs)


def test_configurations_and_examples_have_one_source():
    """The ConfigMaps hold the files themselves; the operator's collector is what its generator writes."""
    folders = (ROOT / "collector-config", ROOT / "collector-config" / "optional", ROOT / "examples")
    files = {path.name: path for folder in folders for path in folder.iterdir()}
    maps = [
        o for o in overlay("job") if o["kind"] == "ConfigMap" and not o["metadata"]["name"].startswith("otel-backends")
    ]
    held = {name: text for item in maps for name, text in item["data"].items()}
    assert held == {name: files[name].read_text() for name in held}
    assert {"sidecar.yaml", "gateway-router.yaml", "gateway.yaml", "train_ddp.py"} <= held.keys()
    generator = runpy.run_path(str(KUBERNETES / "generate.py"))
    assert generator["TARGET"].read_text() == generator["text"](), "run python deploy/kubernetes/generate.py"


def test_the_operator_finds_a_telemetry_that_it_can_read():
    """Else it writes one of its own, on a port of all addresses: it wants the port as a number, and no variable."""
    (collector,) = (o["spec"] for o in overlay("operator") if o["kind"] == "OpenTelemetryCollector")
    metrics = collector["config"]["service"]["telemetry"]["metrics"]
    (reader,) = metrics["readers"]
    own = reader["pull"]["exporter"]["prometheus"]

    assert (metrics["level"], own) == (
        "${env:OWN_METRICS:-none}",
        {"host": "${env:OWN_METRICS_HOST:-127.0.0.1}", "port": 8888},
    )


def test_images_are_pinned_and_of_this_version():
    """No image floats; ours have the version of the package."""
    for name in OVERLAYS:
        text = rendered(KUBERNETES / "overlays" / name)
        images = set(re.findall(r"image: (\S+)", text)) - {"mpi-trainer"}
        assert {image for image in images if ":" not in image or image.endswith(":latest")} == set()
        assert {image.rpartition(":")[2] for image in images if image.startswith("otel-dltrace/")} == {__version__}


def test_the_kustomization_of_the_docs_moves_an_overlay_to_another_namespace_and_registry(tmp_path):
    """The docs' kustomization: namespace, images, back ends; also in the pods of kinds that kustomize does not know."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    users = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    folders = [folder.removeprefix("deploy/kubernetes/") for folder in users.pop("resources")]
    found = objects(own(tmp_path, folders, **users))

    assert {o["metadata"].get("namespace") for o in found if o["kind"] != "Namespace"} == {"team-a"}
    (backends,) = (o["data"] for o in found if o["metadata"]["name"].startswith("otel-backends"))
    assert backends == {"JAEGER_ENDPOINT": "jaeger.tracing:4317", "TEMPO_ENDPOINT": "tempo:4317"}
    containers = [c for t in traced(found) for c in t["spec"]["initContainers"]]
    ours = {c["image"] for c in containers if "otel-dltrace" in c["name"]}
    assert ours == {f"REGISTRY/otel-dltrace/{name}:{__version__}" for name in ("drain", "inject")}


def test_the_kustomization_of_the_docs_moves_the_images_of_the_operator(tmp_path):
    """What the operator copies from and runs stands where kustomize does not look for images: each is patched."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    on_top, *_, of_the_operator = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    found = objects(own(tmp_path, ["overlays/operator"], images=on_top["images"], **of_the_operator))

    specs = {o["kind"]: o["spec"] for o in found if o["kind"] in ("Instrumentation", "OpenTelemetryCollector")}
    images = [specs["Instrumentation"]["python"]["image"], specs["OpenTelemetryCollector"]["image"]]
    drains = [c["image"] for t in traced(found) for c in t["spec"]["initContainers"] if "drain" in c["name"]]
    assert [image.rpartition(":")[0] for image in [*images, *drains]] == [
        "REGISTRY/otel-dltrace/inject",
        "REGISTRY/opentelemetry-collector-contrib",
        "REGISTRY/otel-dltrace/drain",
    ]
    assert images[0].endswith(f":{__version__}")


def test_the_patch_of_the_docs_leaves_the_sidecars_in_their_order(tmp_path):
    """The drain gets its variable, and is still the last to start and the first to end."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    users = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "traced-pod"}}
    patch = {"patch": yaml.safe_dump({**template, **users})}
    (pod,) = traced(objects(changed_overlay(tmp_path, lambda written: written["patches"].append(patch))))

    sidecars = [container for container in pod["spec"]["initContainers"] if "restartPolicy" in container]
    assert [_name(container) for container in sidecars] == ["otel-collector", "otel-dltrace-drain"]
    assert {"name": "OTEL_DLTRACE_STEPS", "value": "all"} in sidecars[1]["env"]


def test_the_patch_of_the_docs_puts_a_claim_in_the_place_of_a_volume(api, tmp_path):
    """The volume for run directories is the claim, and of that type alone."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (volumes,) = re.findall(r"`(volumes: [^`]*)`", page)
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "traced-pod"}}
    patch = {"patch": yaml.safe_dump({**template, "template": {"spec": yaml.safe_load(volumes)}})}
    folder = changed_overlay(tmp_path, lambda written: written["patches"].append(patch))
    found = in_namespace("claim", objects(folder))
    api.do("apply", "--server-side", "-f", "-", given=[o for o in found if o["kind"] == "Namespace"])
    api.do("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", given=found)

    (pod,) = (template["spec"] for template in traced(found))
    (volume,) = (v for v in pod["volumes"] if v["name"] == "otel-dltrace-runs")
    assert volume == {"name": "otel-dltrace-runs", "persistentVolumeClaim": {"claimName": "runs"}}


def test_the_component_tls_has_all_collectors_show_and_ask_for_certificates(api, tmp_path):
    """From the pods to routers and gateways: what a variable or the configuration names is mounted from a Secret."""
    folder = changed_overlay(tmp_path, lambda written: written["components"].append("../../components/tls"))
    found = in_namespace("tls", objects(folder))
    api.do("apply", "--server-side", "-f", "-", given=[o for o in found if o["kind"] == "Namespace"])
    api.do("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", given=found)

    (pod,) = (template["spec"] for template in traced(found))
    assert [_name(c) for c in pod["initContainers"] if "restartPolicy" in c] == ["otel-collector", "otel-dltrace-drain"]
    deployments = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in found if o["kind"] == "Deployment"}
    gateway, router = deployments["otel-gateway"], deployments["otel-gateway-router"]
    for spec, secret in ((pod, "otel-sidecar-tls"), (router, "otel-gateway-tls"), (gateway, "otel-gateway-tls")):
        (volume,) = (v["name"] for v in spec["volumes"] if v.get("secret") == {"secretName": secret})
        (collector,) = (
            c for c in [*spec.get("initContainers", []), *spec["containers"]] if "opentelemetry" in c["image"]
        )
        assert {"name": volume, "mountPath": "/etc/otelcol/tls", "readOnly": True} in collector["volumeMounts"]
        env = {variable["name"]: variable.get("value") for variable in collector["env"]}
        if spec is not pod:
            assert collector["args"][-1] == "--config=/etc/otel-collector/secure.yaml"
        if spec is not gateway:
            files = {env[f"GATEWAY_{name}_FILE"] for name in ("CA", "CERT", "KEY")}
            assert files == {f"/etc/otelcol/tls/{name}" for name in ("ca.crt", "tls.crt", "tls.key")}
            assert env["GATEWAY_INSECURE"] == "false"
            assert env["GATEWAY_SERVER_NAME"] == ("otel-gateway-router" if spec is pod else "otel-gateway")


def test_the_component_tls_reaches_the_collector_of_the_operator(api, tmp_path):
    """It is configured as the sidecar of other overlays is; the operator adds its volumes to those that the pod has."""
    overlays = {}
    for name in ("job", "operator"):
        (copied := tmp_path / name).mkdir()
        change = changed_overlay(copied, lambda written: written["components"].append("../../components/tls"), name)
        overlays[name] = in_namespace("tls-operator", objects(change))
    (sidecar,) = (
        c for t in traced(overlays["job"]) for c in t["spec"]["initContainers"] if _name(c) == "otel-collector"
    )
    (collector,) = (o["spec"] for o in overlays["operator"] if o["kind"] == "OpenTelemetryCollector")
    (job,) = (o for o in overlays["operator"] if o["kind"] == "Job")
    job["spec"]["template"]["spec"]["volumes"] += collector["volumes"]
    found = overlays["operator"]
    api.do("apply", "--server-side", "-f", "-", given=[o for o in found if o["kind"] == "Namespace"])
    api.do("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", given=found)

    in_order = itemgetter("name")
    assert sorted(collector["env"], key=in_order) == sorted(sidecar["env"], key=in_order)
    (mount,) = (m for m in sidecar["volumeMounts"] if m["mountPath"] == "/etc/otelcol/tls")
    assert mount in collector["volumeMounts"]
    assert {"name": mount["name"], "secret": {"secretName": "otel-sidecar-tls"}} in collector["volumes"]


def test_a_gateway_is_left_the_time_to_judge_and_send_before_it_is_ended():
    """Its queue is on a disk that goes with the pod: what is on it at the end is sent by nobody."""
    gateway = yaml.safe_load((ROOT / "collector-config" / "gateway.yaml").read_text())
    wait = int(re.fullmatch(r".*:-(\d+)s}", gateway["processors"]["tail_sampling"]["decision_wait"])[1])
    (found,) = (o for o in overlay("job") if (o["kind"], o["metadata"]["name"]) == ("Deployment", "otel-gateway"))
    pod = found["spec"]["template"]["spec"]
    (collector,) = pod["containers"]
    idle = collector["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert wait + 10 <= idle <= pod["terminationGracePeriodSeconds"] - 30


def test_the_queues_of_a_gateway_fit_on_their_volume():
    """One for each end, and a start writes each anew beside the old one."""
    configured = yaml.safe_load((ROOT / "collector-config" / "optional" / "gateway-on-disk.yaml").read_text())
    queues = [exporter["sending_queue"]["queue_size"] for exporter in configured["exporters"].values()]
    most = sum(int(re.fullmatch(r".*:-(\d+)}", size)[1]) for size in queues)
    (found,) = (o for o in overlay("job") if (o["kind"], o["metadata"]["name"]) == ("Deployment", "otel-gateway"))
    volumes = {volume["name"]: volume for volume in found["spec"]["template"]["spec"]["volumes"]}

    assert 2.5 * most < mebibytes(volumes["queue"]["emptyDir"]["sizeLimit"]) * 2**20


def test_the_monitor_of_the_docs_reaches_what_the_collectors_show():
    """It selects Services by labels and ports by names; a policy admits Prometheus; and something listens there."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    monitor = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[2])["spec"]
    wanted = {endpoint["port"] for endpoint in monitor["endpoints"]}
    found = overlay("job")
    labels = monitor["selector"]["matchLabels"].items()
    services = [o for o in found if o["kind"] == "Service" and labels <= o["metadata"].get("labels", {}).items()]
    ports = {
        (o["metadata"]["name"], p["name"], p["port"])
        for o in services
        for p in o["spec"]["ports"]
        if p["name"] in wanted
    }
    listening = {
        (o["metadata"]["name"], port["name"], port["containerPort"])
        for o in found
        if o["kind"] == "Deployment"
        for port in o["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    admitted = {
        (o["metadata"]["name"], port["port"])
        for o in found
        if o["kind"] == "NetworkPolicy"
        for rule in o["spec"]["ingress"]
        if rule["from"][0]["podSelector"]["matchLabels"] == prometheus
        for port in rule["ports"]
    }

    assert {(service, number) for service, _, number in ports} == admitted
    assert ports <= listening
    assert admitted == {("otel-gateway", 8888), ("otel-gateway", 8889), ("otel-gateway-router", 8888)}


def test_the_network_policies_open_no_port_that_nobody_needs():
    """Every pod is under a policy; from outside of a job only the collectors' ports can be reached."""
    for name in OVERLAYS:
        found = overlay(name)
        policies = [o for o in found if o["kind"] == "NetworkPolicy"]
        for template in pod_templates(found):
            labels = template["metadata"]["labels"].items()
            assert [p for p in policies if p["spec"]["podSelector"]["matchLabels"].items() <= labels]
    opened = {
        policy["metadata"]["name"]: sorted(
            port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])
        )
        for policy in policies
    }
    assert opened == {"traced-pod": [], "otel-gateway-router": [4317, 8888], "otel-gateway": [4317, 8888, 8889]}


def test_a_second_validator_agrees():
    """kubernetes-validate, which needs no server, finds nothing wrong with the kinds it knows."""
    validate = pytest.importorskip("kubernetes_validate")
    checked = set()
    for item in (o for name in OVERLAYS for o in overlay(name)):
        try:
            validate.validate(item, KUBERNETES_VERSION, strict=True)
            checked.add(item["kind"])
        except validate.SchemaNotFoundError:
            assert "." in item["apiVersion"].partition("/")[0]  # a custom kind
    assert {"Job", "StatefulSet", "Deployment", "NetworkPolicy", "HorizontalPodAutoscaler", "Namespace"} <= checked
