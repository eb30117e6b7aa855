"""Write what the operator's collector is configured by: a resource that must hold the text, and cannot name a file.

python deploy/kubernetes/generate.py
"""

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "collector-config" / "sidecar.yaml"
TARGET = HERE / "overlays" / "operator" / "collector.yaml"
HANDED_OVER = {"preStop": {"sleep": {"seconds": 10}}}
"""The operator puts its container behind our drain, so it is the first to be ended: by then the drain, which finds
out by itself that the trainer is gone, has handed over what was left."""
OWN_METRICS_PORT = 8888
"""The operator reads it as a number. Where it finds a text, it puts another telemetry in the place of ours: one that is
on, and for all addresses."""
HEAD = "# Written by deploy/kubernetes/generate.py from collector-config/sidecar.yaml; change that, and run it again.\n"


def collector() -> dict[str, Any]:
    """Return the OpenTelemetryCollector; but for its configuration it is the sidecar of components/traced-pod."""
    template = yaml.safe_load((HERE / "components" / "traced-pod" / "pod-template.yaml").read_text())["template"][
        "spec"
    ]
    sidecar = next(c for c in template["initContainers"] if c["name"] == "otel-collector")
    tags = yaml.safe_load((HERE / "components" / "traced-pod" / "kustomization.yaml").read_text())["images"]
    tag = next(image["newTag"] for image in tags if image["name"] == sidecar["image"])
    spec = {
        "mode": "sidecar",
        "image": f"{sidecar['image']}:{tag}",
        **{name: sidecar[name] for name in ("env", "resources", "securityContext")},
        "lifecycle": HANDED_OVER,
        "volumes": [v for v in template["volumes"] if v["name"] == "otel-collector-queue"],
        "volumeMounts": [m for m in sidecar["volumeMounts"] if m["name"] == "otel-collector-queue"],
        "config": _configuration(),
    }
    kind = {"apiVersion": "opentelemetry.io/v1beta1", "kind": "OpenTelemetryCollector"}
    return {**kind, "metadata": {"name": "otel-sidecar"}, "spec": spec}


def _configuration() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(SOURCE.read_text())
    for reader in config["service"]["telemetry"]["metrics"]["readers"]:
        reader["pull"]["exporter"]["prometheus"]["port"] = OWN_METRICS_PORT
    return config


def text() -> str:
    """Return what the file must be."""
    return HEAD + yaml.safe_dump(collector(), sort_keys=False, width=110)


def write() -> None:
    """Write the file."""
    TARGET.write_text(text())


if __name__ == "__main__":
    write()
