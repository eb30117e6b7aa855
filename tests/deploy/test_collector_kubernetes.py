"""A gateway that asks a real Kubernetes API for the labels of the pods whose spans it gets."""

import json

from otel_dltrace.model import semconv as s
from tests.support import servers
from tests.support.collector_traffic import contents, data_of, ids, real_run, send
from tests.support.kube import cluster

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "trainer-0",
        "namespace": "default",
        "labels": {"jobset.sigs.k8s.io/jobset-name": "resnet", "jobset.sigs.k8s.io/restart-attempt": "2"},
    },
    "spec": {"containers": [{"name": "trainer", "image": "trainer"}]},
}


def test_labels_of_the_pod_stand_with_its_spans(tmp_path):
    """By the pod's uid, which the downward API gives the sidecar; the router in between has no say."""
    with cluster(tmp_path) as api:
        api.do("create", "-f", "-", given=[POD])
        (uid,) = [pod["metadata"]["uid"] for pod in api.get("default", "pods")]
        (tmp_path / "sink").mkdir()
        with servers.collector(tmp_path / "sink") as sink:
            ends = {"TEMPO_ENDPOINT": sink.grpc[7:], "KEEP_PERCENT": "100", "DECISION_WAIT": "1s"}
            access = {"K8S_AUTH_TYPE": "kubeConfig", "KUBECONFIG": str(kubeconfig(api, tmp_path))}
            gateway = servers.configured("gateway", tmp_path / "gateway", "k8s-attributes", **ends, **access)
            pod = {"OTEL_RESOURCE_ATTRIBUTES": f"k8s.pod.uid={uid}"}
            sidecar = servers.configured("sidecar", tmp_path / "sidecar", GATEWAY_ENDPOINT=gateway.grpc[7:], **pod)
            with servers.running(gateway), servers.running(sidecar):
                send(sidecar.grpc, real_run(), tmp_path)
                sink.wait_for(len(ids(data_of(real_run()))))

    labels = {"k8s.jobset.name": "resnet", "k8s.jobset.restart": "2", "k8s.pod.name": "trainer-0"}
    assert [who | labels for _, _, who in contents(sink.traces())] == [who for _, _, who in contents(sink.traces())]
    assert {who[s.DL_RANK] for _, _, who in contents(sink.traces())} == {0, 1}


def kubeconfig(api, folder):
    """Write how a client gets in."""
    path = folder / "kubeconfig"
    inside = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": api.address, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": "test"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(inside))
    return path
