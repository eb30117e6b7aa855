"""The dashboards: they are what their descriptions say, Grafana can read them, and every panel finds data."""

import json
import math
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from otel_dltrace.export.otlp.outcome import Verdict
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.spans import SpanBatch
from tests.support import servers
from tests.support.paths import ROOT
from tests.support.processes import a_place, requests_of
from tests.support.runs import Rank, ddp
from tests.support.sent import SENT
from tests.support.traceql import check

GRAFANA = ROOT / "deploy" / "grafana"
COMPOSE = ROOT / "deploy" / "compose"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
CHOSEN = {"$__rate_interval": "2m", "$job": ".*", "$host": ".*", "$operation": ".*"}
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
"""What a newer Prometheus than Debian's asks for: names may then have dots in them."""
POINTS = {
    m.CPU_MODE: ("user", "idle"),
    m.MEMORY_STATE: ("used", "free"),
    m.DISK_DIRECTION: ("read", "write"),
    m.NETWORK_DIRECTION: ("transmit", "receive"),
    s.DL_PHASE: ("dataloader_next", "forward", m.RESIDUAL),
}
"""Attributes of points of which several values are sent; of others there is one."""
OF_THE_HOST = ("system.", "hw.", "dl.gpu.")


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def panels_of(file: Path, kind: str) -> list[dict[str, Any]]:
    """Return the panels whose data are of *kind*: ``prometheus`` or ``tempo``."""
    return [panel for panel in read(file)["panels"] if panel.get("datasource", {}).get("type") == kind]


def choose(query: str) -> str:
    """Return *query* with a value for each of its variables, as Grafana does."""
    for name, value in CHOSEN.items():
        query = query.replace(name, value)
    return query


# -- the files ----------------------------------------------------------------------------------


def test_the_files_are_what_the_descriptions_say(tmp_path):
    """Who changes a dashboard changes its description, and generates."""
    pytest.importorskip("grafana_foundation_sdk")
    subprocess.run([sys.executable, "-B", GRAFANA / "generate.py", tmp_path], check=True)

    generated = {file.name: file.read_text() for file in tmp_path.glob("*.json")}
    assert generated == {file.name: file.read_text() for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_grafana_knows_every_field(file):
    """Grafana's own types take a dashboard up, and give all of it back."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    taken = Dashboard.from_json(read(file))

    assert json.loads(json.dumps(taken, cls=JSONEncoder)) == read(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_dashboard_refers_to_exists(file):
    """Data sources are those that the compose file provides, variables are defined, no panel lies on another."""
    dashboard = read(file)
    sources = yaml.safe_load((COMPOSE / "grafana" / "datasources" / "datasources.yaml").read_text())["datasources"]
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    text = json.dumps([dashboard["panels"], dashboard["links"], dashboard["templating"]])

    assert {(p["datasource"]["type"], p["datasource"]["uid"]) for p in panels} <= {
        (d["type"], d["uid"]) for d in sources
    }
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"} <= {
        v["name"] for v in dashboard["templating"]["list"]
    }
    cells = [cell for panel in dashboard["panels"] for cell in _cells(panel["gridPos"])]
    assert len(cells) == len(set(cells))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    return product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_that_ask_tempo_find_what_is_sent(file):
    """As the documented queries do."""
    for panel in panels_of(file, "tempo"):
        for target in panel["targets"]:
            check(choose(target["query"]), SENT)


# -- Prometheus ---------------------------------------------------------------------------------


@dataclass
class Prometheus:
    """A Prometheus that scrapes one collector every second, otherwise configured as in the compose file."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of the answer, of an error what it says."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> dict[str, float]:
        """Return the value of each series now, by its labels, but for those that are no number."""
        values = {
            str(series["metric"]): float(series["value"][1]) for series in self.get("query", query=query)["result"]
        }
        return {labels: value for labels, value in values.items() if not math.isnan(value)}


@contextmanager
def prometheus(folder: Path, target: str, honor_labels: bool) -> Iterator[Prometheus]:
    """Run a Prometheus that asks *target*."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus on PATH: `make test-deps` installs Debian's")
    config = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    config["global"]["scrape_interval"] = "1s"
    scrape["static_configs"][0]["targets"] = [target]
    scrape["honor_labels"] = honor_labels
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{servers.free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=log,
        )
    found = Prometheus(f"http://{address}")
    try:
        servers.wait_until(lambda: _ready(process, found), what="Prometheus being ready")
        yield found
    finally:
        process.terminate()
        process.wait(60)


def _ready(process: "subprocess.Popen[bytes]", found: Prometheus) -> bool:
    assert process.poll() is None, "Prometheus ended"
    with suppress(OSError), urllib.request.urlopen(f"{found.url}/-/ready", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


# -- what they reckon ---------------------------------------------------------------------------

STEP, STAGE, EXPOSED = (f"dl_step_{name}_seconds" for name in ("duration", "stage_duration", "grad_sync_exposed"))


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """Return one for promtool, a value every 15 seconds."""
    of = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{of}}}", "values": values}


def histogram(name: str, total: float, times: int, **labels: str) -> list[dict[str, str]]:
    """Return the sum and the count of a histogram that sees *times* values in 15 seconds, *total* together."""
    return [series(f"{name}_{end}", f"0+{by}x40", **labels) for end, by in (("sum", total), ("count", times))]


A, B = ({"service_name": job} for job in "ab")
A_0, A_1, B_0 = ({**job, "dl_rank": rank} for job, rank in ((A, "0"), (A, "1"), (B, "0")))
RARE = [
    *[it for rank in (A_0, A_1) for it in histogram(STEP, 8, 4, **rank)],
    *[it for rank in (A_0, A_1) for it in histogram(STAGE, 2, 4, dl_phase="forward", **rank)],
    *histogram(STAGE, 2, 1, dl_phase="evaluate", **A_0),
    *histogram(STEP, 8, 4, **B_0),
    *histogram(STAGE, 1, 4, dl_phase="forward", **B_0),
]
"""Two jobs; one rank of the first evaluates once in four steps, for two seconds."""
PROCESS = {"host_name": "node-0", **A_0}
RECKONED = [
    pytest.param(
        "Where a step goes",
        RARE,
        {(*A.items(), ("dl_phase", "forward")): 0.5, (*A.items(), ("dl_phase", "evaluate")): 0.25}
        | {(*B.items(), ("dl_phase", "forward")): 0.25},
        id="a rare stage counts in all steps",
    ),
    pytest.param(
        "Stages",
        RARE,
        {(*A.items(), ("dl_phase", "forward")): 0.5, (*A.items(), ("dl_phase", "evaluate")): 2}
        | {(*B.items(), ("dl_phase", "forward")): 0.25},
        id="or in its own",
    ),
    pytest.param(
        "Own time by rank",
        [*histogram(STEP, 8, 4, **A_0), *histogram(EXPOSED, 1, 2, **A_0), *histogram(STEP, 8, 4, **B_0)],
        {(*A_0.items(),): 1.5},
        id="exposed time that is known of half of the steps, or of none",
    ),
    pytest.param(
        "Exposed communication by rank",
        [*histogram(STEP, 8, 4, **A_0), *histogram(EXPOSED, 1, 2, **A_0)],
        {(*A_0.items(),): 0.25},
        id="a share of the steps of which it is known",
    ),
    pytest.param(
        "Step time by rank",
        [*histogram(STEP, 8, 4, **A_0), *histogram(STEP, 4, 4, **B_0)],
        {(*A_0.items(),): 2, (*B_0.items(),): 1},
        id="two jobs",
    ),
    pytest.param(
        "CPU of ranks",
        [
            series("process_cpu_utilization_ratio", f"{share}x40", cpu_mode=mode, **who)
            for who in (PROCESS, {**PROCESS, "dl_role": "server"}, {**PROCESS, **B_0})
            for mode, share in (("user", 0.25), ("system", 0.125))
        ],
        {(*A_0.items(),): 0.375, (*A_0.items(), ("dl_role", "server")): 0.375, (*B_0.items(),): 0.375},
        id="user and system, worker and server, two jobs",
    ),
]


@pytest.mark.parametrize(("title", "given", "wanted"), RECKONED)
def test_a_panel_reckons_what_it_says(tmp_path, title, given, wanted):
    """Prometheus' own tool answers from the series that are given it."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("there is no promtool on PATH: `make test-deps` installs Debian's")
    samples = [
        {"labels": "{" + ", ".join(f'{name}="{value}"' for name, value in labels) + "}", "value": value}
        for labels, value in wanted.items()
    ]
    asked = {"expr": query_of(title), "eval_time": "5m", "exp_samples": samples}
    case = {"interval": "15s", "input_series": given, "promql_expr_test": [asked]}
    (tmp_path / "case.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    done = subprocess.run([tool, "test", "rules", tmp_path / "case.yaml"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


# -- what is sent -------------------------------------------------------------------------------


def spans() -> list[SpanBatch]:
    """Return two ranks that train, an operation that fails, and pushes and pulls with the server's side of them."""
    failed = Rank(2, 3).step(0, 0, 30).collective(0, 1, 2, 1, flags=Flag.ERROR)
    worker = Rank(0, 1, nonce=77).step(1, 0, 30)
    for name in ("PUSH", "PULL"):
        worker.add(Descriptor(s.PHASE, name, queue_type=name, tensor="fc", key=7), 1, 2, 9, a=50)
    pushed = worker.batch()
    server = Rank(0, 1, role="server", nonce=78)
    for row, name in ((1, s.PUSH), (2, s.PULL)):
        parent = {"flags": Flag.REMOTE, "parent_id": pushed["span_id"][row], "b": 0}
        server.add(Descriptor(s.PHASE, name, tensor="fc", key=7), 1, 3, 8, **parent)
    return [*ddp(2, 6, slow={(1, "forward"): 5.0}), failed.batch(), pushed, server.batch()]


def send_spans(endpoint: str) -> set[str]:
    """Send all `spans`, and return the ids of their traces."""
    transport = connect(OtlpSettings(f"{endpoint}/v1/traces"))
    traces = set()
    for batch in spans():
        ids = trace_id_column(batch, batch.process.bind)
        traces |= {row.tobytes().hex() for row in ids}
        for request in requests_of(batch, ids, resource_attributes(batch.process)):
            assert transport.send(request.body, 10).verdict is Verdict.ACCEPTED
    transport.close()
    return traces


class Metrics:
    """Every metric there is, sent by OpenTelemetry's own SDK, as of one run on one host."""

    def __init__(self, endpoint: str, run: str = "one") -> None:
        exporter = OTLPMetricExporter(endpoint, insecure=True)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
        who = {s.SERVICE_NAME: "demo", s.HOST_NAME: "node-0", s.DL_ROLE: "worker", s.SERVICE_INSTANCE_ID: run}
        resource = Resource(who)
        self.provider = MeterProvider([reader], resource)
        meter = self.provider.get_meter("otel_dltrace")
        make = {
            m.GAUGE: (meter.create_gauge, "set"),
            m.COUNTER: (meter.create_counter, "add"),
            m.UPDOWNCOUNTER: (meter.create_up_down_counter, "add"),
            m.HISTOGRAM: (meter.create_histogram, "record"),
        }
        self.instruments = []
        for metric in m.METRICS.values():
            create, verb = make[metric.instrument]
            self.instruments.append((metric, getattr(create(metric.name, metric.unit), verb)))

    def send(self) -> None:
        """Add to every series."""
        for metric, put in self.instruments:
            ranks = [{}] if metric.name.startswith(OF_THE_HOST) else [{s.DL_RANK: 0}, {s.DL_RANK: 1}]
            values = [POINTS.get(name, ("one",)) for name in metric.attributes]
            for chosen, rank in product(product(*values), ranks):
                put(0.5, dict(zip(metric.attributes, chosen, strict=True)) | rank)
        assert self.provider.force_flush()


def see_data(found: Prometheus, wanted: tuple[str, ...] = ("",), while_: Callable[[], bool] = lambda: True) -> None:
    """Wait until each query of each panel whose name begins with one of *wanted* has answered with a number.

    Args:
        found: Whom to ask.
        wanted: Beginnings of ``<dashboard>: <panel>``.
        while_: Whether it is still worth waiting.
    """
    panels = [(f"{file.stem}: {panel['title']}", panel) for file in FILES for panel in panels_of(file, "prometheus")]
    silent = [
        (name, target["expr"]) for name, panel in panels if name.startswith(wanted) for target in panel["targets"]
    ]
    assert silent

    def all_seen() -> bool:
        silent[:] = [(name, query) for name, query in silent if not found.values(choose(query))]
        return not silent or not while_()

    with suppress(AssertionError):  # what is missing says more
        servers.wait_until(all_seen)
    assert silent == []


def names_for(target: str, accept: str) -> set[str]:
    """Return the names of the histograms and counters that *target* shows to who asks in this way."""
    request = urllib.request.Request(f"http://{target}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return set(re.findall(r"^(\S+_(?:total|sum|bucket))[{ ]", answer.read().decode(), re.MULTILINE))


def query_of(title: str) -> str:
    """Return what the panel *title* asks."""
    (panel,) = [panel for file in FILES for panel in panels_of(file, "prometheus") if panel["title"] == title]
    return choose(panel["targets"][0]["expr"])


@contextmanager
def observed(
    folder: Path, honor_labels: bool = True
) -> Iterator[tuple[servers.Collector, servers.Collector, Prometheus]]:
    """Run sidecar, gateway and Prometheus, as they are in a cluster but for what keeps traces."""
    nowhere = f"127.0.0.1:{servers.free_port()}"
    keeps = {"TEMPO_ENDPOINT": nowhere, "JAEGER_ENDPOINT": nowhere}
    quick = {"METRICS_FLUSH": "1s", "GRAPH_TTL": "2s", "DECISION_WAIT": "1s"}
    gateway = servers.configured("gateway", folder / "gateway", **keeps, **quick)
    address = gateway.grpc.removeprefix("http://")
    sidecar = servers.configured("sidecar", folder / "sidecar", GATEWAY_ENDPOINT=address, HOST_METRICS_INTERVAL="1s")
    with (
        servers.running(gateway),
        servers.running(sidecar),
        prometheus(folder, gateway.env["PROMETHEUS_ENDPOINT"], honor_labels) as found,
    ):
        yield sidecar, gateway, found


def test_every_panel_finds_data(tmp_path):
    """From our encoder through sidecar and gateway to Prometheus: each query of each panel answers with numbers."""
    with observed(tmp_path) as (sidecar, gateway, found):
        metrics = Metrics(sidecar.grpc)
        traces = send_spans(sidecar.http)

        def grow() -> bool:
            """Send all again: a rate needs a series that grows while it is looked at."""
            send_spans(sidecar.http)
            metrics.send()
            return True

        see_data(found, while_=grow)
        metrics.provider.shutdown()

        shown = names_for(gateway.env["PROMETHEUS_ENDPOINT"], PROMETHEUS_3)
        assert "traces_span_metrics_calls_total" in shown <= set(found.get("label/__name__/values"))
        latest = {"query": "traces_span_metrics_duration_seconds_bucket", "start": "0", "end": "9999999999"}
        exemplars = [e for series in found.get("query_exemplars", **latest) for e in series["exemplars"]]
        assert {exemplar["labels"]["trace_id"] for exemplar in exemplars} <= traces
        assert exemplars


ONCE = {
    "CPU": {"{'host_name': 'node-0'}": 0.5},
    "Memory in use": {"{'host_name': 'node-0'}": 0.5},
    "Memory of ranks": {
        f"{{'dl_rank': '{rank}', 'dl_role': 'worker', 'service_name': 'demo'}}": 0.5 for rank in range(2)
    },
    "Samples a second": {"{'service_name': 'demo'}": 1.0},
    "Batches a second": {"{'service_name': 'demo'}": 0.5},
}
"""What panels show of `Metrics`, in which each rank and each mode has 0.5."""


@pytest.mark.parametrize(
    "honor_labels", [pytest.param(True, id="as in compose"), pytest.param(False, id="as Prometheus does unless told")]
)
def test_a_job_that_is_started_again_is_not_counted_twice(tmp_path, honor_labels):
    """The collector shows the values of the run before for some minutes more: of the same host, and the same ranks."""
    with observed(tmp_path, honor_labels) as (sidecar, _, found):
        for run in ("one", "two"):
            metrics = Metrics(sidecar.grpc, run)
            metrics.send()
            metrics.provider.shutdown()
        servers.wait_until(
            lambda: (
                found.values("count by (service_name) (dl_throughput_batches_per_second)")
                == {"{'service_name': 'demo'}": 4.0}
            )
        )

        assert {title: found.values(query_of(title)) for title in ONCE} == ONCE


SLOW = ["--epochs", "1000", "--width", "64", "--slow-rank", "1", "--slow-ms", "150"]
NEEDED = ("training: ", "hosts: CPU", "hosts: Memory", "communication: Latenc")
"""Panels that any training on any machine has data for; not each has disks or GPUs to show."""


def test_a_slow_rank_stands_out_while_it_trains(tmp_path):
    """A real training, its own drain: rank 1 works 150 ms longer than it has to, and the dashboard says so."""
    with observed(tmp_path) as (sidecar, _, found), a_place(tmp_path) as place:
        env = {
            "OTEL_DLTRACE": "1",
            "OTEL_DLTRACE_METRICS": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": sidecar.http,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OMP_NUM_THREADS": "1",
        }
        program = place.write((ROOT / "examples" / "train_ddp.py").read_text())
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        training = place.popen([*launcher, str(program), *SLOW], **env)
        see_data(found, NEEDED, while_=lambda: training.poll() is None)
        # Not at the first look: the first steps may be anybody's.
        servers.wait_until(lambda: late_ranks(found.values(query_of("Behind the median rank"))) == [(True, True)])
        training.terminate()
        training.communicate(timeout=240)


def late_ranks(behind: dict[str, float]) -> list[tuple[bool, bool]]:
    """Return for each rank behind the median whether it is rank 1, and whether that is by more than 5 ms."""
    return [("'dl_rank': '1'" in rank, seconds > 0.005) for rank, seconds in behind.items() if seconds > 0]
