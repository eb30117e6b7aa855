"""deploy/compose: what the compose file names is there, is pinned, and fits together; parts of it are acted out."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_dltrace.export.otlp.outcome import Verdict
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model.attributes import resource_attributes
from tests.support import servers
from tests.support.paths import ROOT
from tests.support.processes import requests_of
from tests.support.runs import ddp
from tests.support.sent import SENT

HERE = ROOT / "deploy" / "compose"
FILE = HERE / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def config(name: str) -> Any:
    """Return a configuration that a service has mounted."""
    return yaml.safe_load((HERE / name).read_text(encoding="utf-8"))


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is mounted where."""
    return [tuple(volume.split(":")[:2]) for volume in service.get("volumes", [])]


def test_it_is_a_compose_file():
    """By the schema of the Compose specification, and by docker where it knows Compose."""
    pytest.importorskip("check_jsonschema")
    schema = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", FILE]
    done = subprocess.run(schema, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "ok -- validation done\n")


def test_docker_takes_it():
    """All variables are set, all files are there."""
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker with its compose plugin is not here")

    subprocess.run([docker, "compose", "-f", FILE, "config", "--quiet"], check=True)


def test_all_that_is_mounted_exists():
    """Folders and files beside it, volumes in it; and no dashboard without a folder that Grafana reads."""
    sources = [source for service in SERVICES.values() for source, _ in mounts(service)]
    files = {source for source in sources if source.startswith(".")}

    assert [source for source in files if not (HERE / source).exists()] == []
    assert set(sources) - files == set(COMPOSE["volumes"])
    provider = config("grafana/dashboards/dashboards.yaml")["providers"][0]["options"]["path"]
    assert provider in [target for _, target in mounts(SERVICES["grafana"])]


def test_what_a_command_reads_is_mounted():
    """Every path below /etc in a command or a variable."""
    for service in SERVICES.values():
        targets = [target for _, target in mounts(service)]
        said = " ".join([*service.get("command", []), *map(str, service.get("environment", {}).values())])
        for path in re.findall(r"/etc/[\w/.-]+", said):
            assert any(path == target or path.startswith(f"{target}/") for target in targets), path


def test_versions_are_pinned_and_ports_are_the_loopbacks():
    """The same images tomorrow, and nobody else's traces or dashboards on the network; no port twice."""
    assert {name: service["image"] for name, service in SERVICES.items()} == {
        name: service["image"]
        for name, service in SERVICES.items()
        if re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    }
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert [port for port, times in Counter(port.split(":")[1] for port in ports).items() if times > 1] == []


def test_who_is_named_is_there_and_listens():
    """Each host:port that one service knows another by is the port that the other one's configuration opens."""
    listening = {
        ("jaeger", "4317"),
        ("jaeger", "16686"),
        (
            "tempo",
            config("tempo.yaml")["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].split(":")[1],
        ),
        ("tempo", str(config("tempo.yaml")["server"]["http_listen_port"])),
        ("prometheus", "9090"),
        ("collector", SERVICES["collector"]["environment"]["PROMETHEUS_ENDPOINT"].split(":")[1]),
    }
    jaeger = (HERE / "jaeger.yaml").read_text()
    said = [json.dumps(SERVICES["collector"]["environment"])]
    said += [(HERE / name).read_text() for name in ("prometheus.yaml", "grafana/datasources/datasources.yaml")]
    named = set(re.findall(rf"\b({'|'.join(SERVICES)}):(\d+)", " ".join(said)))

    assert named == listening
    assert re.findall(r":-0\.0\.0\.0:(\d+)", jaeger) == ["16686", "16685", "4317"]


def test_tempos_columns_are_attributes_that_are_sent():
    """By the type that they are sent with, and no more than Tempo has columns for."""
    columns = config("tempo.yaml")["storage"]["trace"]["block"]["parquet_dedicated_columns"]

    assert {f"{c['scope']}.{c['name']}": c["type"] for c in columns}.items() <= SENT.items()
    most = Counter((c["scope"], c["type"]) for c in columns)
    assert all(number <= {"int": 5, "string": 20}[kind] for (_, kind), number in most.items())


def test_prometheus_takes_its_configuration():
    """As its own tool says."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("there is no promtool on PATH: `make test-deps` installs Debian's")

    done = subprocess.run(
        [tool, "check", "config", HERE / "prometheus.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_step_goes_from_its_drain_to_jaeger(tmp_path):
    """The collector and Jaeger run as the compose file says, but for addresses: what HTTP brings is found whole."""
    query, otlp, nowhere = (f"127.0.0.1:{servers.free_port()}" for _ in range(3))
    addresses = {"jaeger:4317": otlp, "tempo:4317": nowhere}
    said = {name: addresses.get(value, value) for name, value in SERVICES["collector"]["environment"].items()}
    said = {name: value for name, value in said.items() if not value.startswith("0.0.0.0")}
    gateway = servers.configured("gateway", tmp_path, **{**said, "DECISION_WAIT": "1s"})
    gateway.overlays = (_mounted("collector", "/etc/otelcol/collector.yaml"),)
    assert gateway.config.samefile(_mounted("collector", "/etc/otelcol/gateway.yaml"))
    env = {
        **SERVICES["jaeger"]["environment"],
        "JAEGER_OTLP_ENDPOINT": otlp,
        "JAEGER_QUERY_ENDPOINT": query,
        "JAEGER_QUERY_GRPC_ENDPOINT": f"127.0.0.1:{servers.free_port()}",
    }
    config_file = _mounted("jaeger", "/etc/jaeger/jaeger.yaml")
    jaeger = servers.Jaeger("jaeger", config_file, tmp_path / "jaeger.log", env, query=f"http://{query}")
    batches = ddp(2, 1)
    with servers.running(jaeger), servers.running(gateway):
        transport = connect(OtlpSettings(f"{gateway.http}/v1/traces"))
        for batch in batches:
            ids = trace_id_column(batch, batch.process.bind)
            (request,) = requests_of(batch, ids, resource_attributes(batch.process))
            assert transport.send(request.body, 10).verdict is Verdict.ACCEPTED
        transport.close()
        found = servers.spans_of(jaeger.trace(ids[0].tobytes().hex(), sum(map(len, batches)), 60))

    sent = [int(span).to_bytes(8, "big") for batch in batches for span in batch["span_id"]]
    assert sorted(span.span_id for span in found) == sorted(sent)


def _mounted(service: str, target: str) -> Path:
    (source,) = [source for source, place in mounts(SERVICES[service]) if place == target]
    return HERE / source
