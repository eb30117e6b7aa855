"""Metrics from real programs through the drain to a real collector, and into the run directory."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from otel_dltrace.export import choice
from otel_dltrace.export.metrics.pipeline import Pipeline
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.rundir.metric_reader import read_metrics
from otel_dltrace.export.rundir.reader import read_summaries
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import METRICS, SEED
from otel_dltrace.model.summary import summary_line
from tests.support.certificates import make_certificates
from tests.support.metric_points import MetricsCollector, Seen, metrics_collector
from tests.support.processes import Place, a_place
from tests.support.servers import wait_until

ON = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_METRICS": "1", "OTEL_METRIC_EXPORT_INTERVAL": "200"}

UNTIL_TOLD = """
    import os, sys, time
    import otel_dltrace as d

    d.start()
    step = 0
    while not os.path.exists("enough"):
        with d.step(batch_size=32):
            with d.phase("forward"):
                time.sleep(0.01)
        step += 1
    with d.step(batch_size=5):  # the last, partial batch
        pass
    with open("steps", "w") as file:
        file.write(str(step + 1))
"""
"""Trains until the test says that it has seen enough."""

NVML = """
    from types import SimpleNamespace
    NVML_SUCCESS = NVML_TEMPERATURE_GPU = 0
    class NVMLError(Exception):
        value = 3
    def unsupported(*_):
        raise NVMLError("Not Supported")
    nvmlInit = lambda: None
    nvmlDeviceGetCount = lambda: 1
    nvmlDeviceGetHandleByIndex = lambda index: index
    nvmlDeviceGetUUID = lambda gpu: "GPU-11111111-2222"
    nvmlDeviceGetName = lambda gpu: "Fake"
    nvmlDeviceGetUtilizationRates = lambda gpu: SimpleNamespace(gpu=42)
    nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=100, used=30, free=70)
    nvmlDeviceGetPowerUsage = nvmlDeviceGetTotalEnergyConsumption = nvmlDeviceGetTemperature = unsupported
    nvmlDeviceGetCurrentClocksThrottleReasons = nvmlDeviceGetFieldValues = unsupported
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Give a working folder with rings of its own, and a module ``pynvml`` that its programs find first."""
    folder = tmp_path / "work"
    (folder / "fake").mkdir(parents=True)
    with a_place(folder) as it:
        it.write(NVML, "fake/pynvml.py")
        yield it


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[MetricsCollector]:
    """Run a collector for metrics."""
    with metrics_collector(tmp_path) as it:
        yield it


def to(collector: MetricsCollector, place: Place, **more: str) -> dict[str, str]:
    """Return the environment that sends metrics to *collector*, with one fake GPU."""
    path = os.pathsep.join([str(place.folder / "fake"), os.environ.get("PYTHONPATH", "")])
    return {**ON, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "PYTHONPATH": path.rstrip(os.pathsep), **more}


def seed_points(collector: MetricsCollector) -> dict[str, list[Seen]]:
    """Return the last points of each of the seed's metrics."""
    return {
        seed.name: [p for p in collector.latest(seed.metric).values() if dict(seed.of).items() <= p.attributes.items()]
        for seed in SEED
    }


def enough(place: Place, process) -> None:
    """Have the program end, and check that it did so well."""
    (place.folder / "enough").touch()
    result = place.finish(process)
    assert result.returncode == 0, result.stderr


def drained(place: Place) -> None:
    """Have the drain end, once every ring has been read, and wait until it has: all has been exported then."""
    place.wait_for_rings()
    for drain in place.drains():
        drain.terminate()
    place.wait_for_drains()


def test_all_nine_metrics_of_the_seed_come_to_the_collector_as_psutil_sees_them(place, collector):
    """Counters lie between this test's own readings before and after; ratios and states add up; units are right."""
    before = (psutil.disk_io_counters(perdisk=True), psutil.net_io_counters(pernic=True), psutil.cpu_times())
    process = place.start(UNTIL_TOLD, **to(collector, place))
    wait_until(lambda: all(seed_points(collector).values()), what="all nine metrics")
    enough(place, process)
    drained(place)
    found = seed_points(collector)
    after = (psutil.disk_io_counters(perdisk=True), psutil.net_io_counters(pernic=True), psutil.cpu_times())
    memory = psutil.virtual_memory()

    assert {name: {(p.unit, p.kind) for p in points} for name, points in found.items()} == {
        seed.name: {(METRICS[seed.metric].unit, METRICS[seed.metric].instrument)} for seed in SEED
    }
    assert [p.value for p in found["GPU utilization"]] == [0.42]
    assert [(p.value, p.attributes[m.HW_ID]) for p in found["GPU memory usage"]] == [(30, "GPU-11111111-2222")]
    for name, field in (("sent", "bytes_sent"), ("received", "bytes_recv")):
        for p in found[f"Network throughput ({name})"]:
            low, high = (getattr(x[1][p.attributes[m.INTERFACE]], field) for x in (before, after))
            assert low <= p.value <= high
    disks = [(p, "bytes") for way in ("read", "write") for p in found[f"Disk throughput ({way})"]]
    for p, what in [*disks, *((p, "count") for p in found["Disk IOPS"])]:
        field = f"{p.attributes[m.DISK_DIRECTION]}_{what}"
        low, high = (getattr(x[0][p.attributes[m.DEVICE]], field) for x in (before, after))
        assert low <= p.value <= high
    states = {p.attributes[m.MEMORY_STATE]: p.value for p in collector.latest(m.SYSTEM_MEMORY_USAGE).values()}
    limit = [p.value for p in collector.latest(m.SYSTEM_MEMORY_LIMIT).values()]
    assert [sum(states.values())] == limit
    assert limit[0] <= memory.total
    modes = {p.attributes[m.CPU_MODE]: p.value for p in found["Average CPU utilization across cores"]}
    assert modes.keys() >= {"user", "system", "idle"}
    # A share, and no percentage; ticks may fall into the next sample, many where the drain is kept waiting.
    assert all(0 <= value <= 10 for value in modes.values())
    for p in collector.latest(m.SYSTEM_CPU_TIME).values():
        if p.attributes[m.CPU_MODE] in ("user", "system"):
            low, high = (getattr(x[2], p.attributes[m.CPU_MODE]) for x in (before, after))
            assert low <= p.value <= high


def test_every_point_says_which_job_and_host_it_is_of_and_little_else(place, collector):
    """The resource is that of the spans without the rank, which is an attribute; only attributes of the table."""
    process = place.start(
        UNTIL_TOLD, **to(collector, place, OTEL_SERVICE_NAME="bert", OTEL_RESOURCE_ATTRIBUTES="team=red")
    )
    wait_until(lambda: collector.points(m.PROCESS_MEMORY_USAGE) and collector.points(m.DL_STEP_DURATION))
    enough(place, process)
    drained(place)
    points = collector.points()
    (resource,) = {json.dumps(p.resource, sort_keys=True) for p in points}
    resource = json.loads(resource)

    assert {name: resource[name] for name in (s.SERVICE_NAME, s.DL_WORLD, s.DL_WORLD_SIZE, s.HOST_NAME, "team")} == {
        s.SERVICE_NAME: "bert",
        s.DL_WORLD: "default",
        s.DL_WORLD_SIZE: 1,
        s.HOST_NAME: os.uname().nodename,
        "team": "red",
    }
    assert {s.DL_RANK, s.PROCESS_PID} & resource.keys() == set()
    assert {p.metric for p in points} <= METRICS.keys()
    assert [p for p in points if p.attributes.keys() - {*METRICS[p.metric].attributes, s.DL_RANK}] == []
    assert {(p.unit, p.kind) for p in points} <= {(metric.unit, metric.instrument) for metric in METRICS.values()}
    of_ranks = {p.metric for p in points if s.DL_RANK in p.attributes}
    assert of_ranks >= {m.PROCESS_CPU_TIME, m.DL_STEP_DURATION, m.DL_TRAIN_SAMPLES, m.DL_THROUGHPUT_BATCHES}


def test_two_drains_of_one_machine_are_two_instances(place, collector):
    """Two pods of a job on one node: the machine is the same, and a back end must not take their series for one."""
    job = to(collector, place, OTEL_DLTRACE_JOB="one", OTEL_DLTRACE_RUN="one", WORLD_SIZE="2")
    pods = [
        place.start(UNTIL_TOLD, **job, RANK=rank, OTEL_DLTRACE_RING_DIR=str(place.rings / rank)) for rank in ("0", "1")
    ]
    ids = wait_until(lambda: len(found := _instances(collector)) == 2 and found, what="points of both")
    for process in pods:
        enough(place, process)

    assert ids[0] != ids[1]
    assert len(place.runs()) == 1


def _instances(collector: MetricsCollector) -> dict[int, str]:
    """Return, by rank, the instance that a rank's points are of."""
    points = collector.points(m.PROCESS_MEMORY_USAGE)
    return {point.attributes[s.DL_RANK]: point.resource[s.SERVICE_INSTANCE_ID] for point in points}


def test_the_run_directory_has_what_was_sampled_beside_the_spans(place, collector):
    """The same metrics, with their time on the spans' clock."""
    process = place.start(UNTIL_TOLD, **to(collector, place))
    wait_until(lambda: collector.points(m.SYSTEM_CPU_UTILIZATION))
    enough(place, process)
    drained(place)
    (batch,) = read_metrics(place.runs()[0])
    (spans,) = place.spans()

    sampled = {name for name in METRICS if name.startswith(("system.", "process.")) and collector.points(name)}
    assert sampled <= set(batch.metrics)
    assert batch.boot_id == spans.process.boot_id
    inside = (batch.time >= spans["start"].min()) & (batch.time <= spans["end"].max())
    assert inside.any()


SHORT = """
    import otel_dltrace as d
    d.start()
    for size in (32, 32, 32, 5):
        with d.step(batch_size=size), d.phase("forward"):
            pass
"""
UNUSUAL = {
    "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    "OTEL_EXPORTER_OTLP_INSECURE": "false",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "",
}
"""What spans go out with, and what the official exporter of metrics fails at or takes for TLS."""


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="no window but the default"),
        pytest.param({"OTEL_DLTRACE_STEPS": "900-901"}, id="the window is closed"),
        pytest.param({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, id="grpc"),
        pytest.param({**UNUSUAL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, id="grpc, said unusually"),
        pytest.param({"OTEL_DLTRACE_LEVEL": "step", "OTEL_METRIC_EXPORT_INTERVAL": ""}, id="60 s, and a run of none"),
    ],
)
def test_the_step_summary_is_there_without_being_asked_for(env, place, collector):
    """Wherever metrics have an endpoint; down to the last partial batch, though no interval has passed."""
    endpoint = collector.grpc if "grpc" in env.values() else collector.http
    place.run(SHORT, OTEL_DLTRACE="1", **{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **env})
    drained(place)

    counted = {
        (p.metric, p.attributes.get(s.DL_PHASE, "")): p.count
        for metric in (m.DL_STEP_DURATION, m.DL_STEP_STAGE_DURATION)
        for p in collector.latest(metric).values()
    }
    totals = {
        name: [p.value for p in collector.latest(name).values()] for name in (m.DL_TRAIN_SAMPLES, m.DL_TRAIN_BATCHES)
    }
    assert counted == {
        (m.DL_STEP_DURATION, ""): 4,
        (m.DL_STEP_STAGE_DURATION, "forward"): 4,
        (m.DL_STEP_STAGE_DURATION, "residual"): 4,
    }
    assert totals == {m.DL_TRAIN_SAMPLES: [101], m.DL_TRAIN_BATCHES: [4]}
    assert collector.points(m.SYSTEM_CPU_TIME) == []


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_certificates_count_for_metrics_as_for_spans(protocol, tmp_path, certificates, monkeypatch):
    """Whatever other authority the environment names for requests."""
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", make_certificates(tmp_path / "other").authority)
    c = certificates
    tls = {"cert_file": c.server, "key_file": c.server_key, "client_ca_file": c.authority}
    with metrics_collector(tmp_path, tls=tls) as collector:
        env = {
            "ENDPOINT": collector.grpc if protocol == "grpc" else collector.http,
            "PROTOCOL": protocol,
            "CERTIFICATE": c.authority,
            "CLIENT_CERTIFICATE": c.client,
            "CLIENT_KEY": c.client_key,
        }
        settings = MetricSettings.from_env({f"OTEL_EXPORTER_OTLP_{name}": value for name, value in env.items()})
        made = Pipeline(settings, {"service.name": "bert"})
        made.observe([Point(m.SYSTEM_CPU_TIME, 1.0)])
        made.finish()
        assert made.wait(30.0)
        wait_until(lambda: collector.points(m.SYSTEM_CPU_TIME), what="the point")


SLOW_RANK = """
    import time
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    class Model(torch.nn.Linear):
        def forward(self, batch):
            time.sleep(0.2 if dist.get_rank() == 1 else 0.0)
            return super().forward(batch)

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Model(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(45, 8)), batch_size=4):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""


def test_the_summary_alone_names_the_rank_that_holds_the_others_up(place, collector):
    """With the window closed, and without comparing clocks: its frontier leads from the planted stage on."""
    pytest.importorskip("torch")
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http}
    result = place.torchrun(SLOW_RANK, OTEL_DLTRACE="1", OTEL_DLTRACE_STEPS="900-901", **endpoint)
    drained(place)

    spent = {
        (p.attributes[s.DL_RANK], p.attributes[s.DL_PHASE]): p
        for p in collector.latest(m.DL_STEP_STAGE_DURATION).values()
    }
    exposed = {p.attributes[s.DL_RANK]: p.count for p in collector.latest(m.DL_STEP_GRAD_SYNC_EXPOSED).values()}
    samples = {p.attributes[s.DL_RANK]: p.value for p in collector.latest(m.DL_TRAIN_SAMPLES).values()}
    until_forward = ("dataloader_next", "prepare_batch", "forward")
    frontier = [sum(spent[rank, stage].value for stage in until_forward) for rank in (0, 1)]
    assert result.returncode == 0, result.stderr
    assert spent[1, "forward"].value >= 12 * 0.2
    assert frontier[1] > frontier[0]
    assert {spent[rank, "backward"].count for rank in (0, 1)} == {12}
    assert (exposed, samples) == ({0: 12, 1: 12}, {0: 45, 1: 45})


def test_a_killed_run_loses_no_step(place, collector):
    """SIGKILL in the middle: what had ended is in the totals, the histograms and the run directory."""
    program = """
        import os, signal
        import otel_dltrace as d
        d.start()
        for size in (32, 32, 5):
            with d.step(batch_size=size):
                pass
        with d.step(batch_size=32):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    result = place.run(program, **to(collector, place))
    place.wait_for_drains()

    (samples,) = collector.latest(m.DL_TRAIN_SAMPLES).values()
    (steps,) = collector.latest(m.DL_STEP_DURATION).values()
    assert (result.returncode, samples.value, steps.count) == (-signal.SIGKILL, 69, 3)
    assert sum(len(batch) for batch in read_metrics(place.runs()[0])) > 0


RESTARTED = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(22 if attempt else 30, 8)), batch_size=4):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not attempt:
        sys.exit(3)
    dist.destroy_process_group()
"""


def test_a_restart_goes_on_in_the_same_job_with_its_own_attempt(place, collector):
    """Torchrun starts the rank again: both attempts' totals are whole, each under its resource."""
    pytest.importorskip("torch")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    restart = ["--max-restarts", "1", "--monitor-interval", "0.1", str(place.write(RESTARTED))]
    process = place.popen([*launcher, *restart], **to(collector, place, OMP_NUM_THREADS="1"))
    result = place.finish(process)
    drained(place)

    totals = {
        (p.resource[s.DL_JOB_ATTEMPT], p.resource[s.DL_JOB_GENERATION]): p.value
        for p in collector.points(m.DL_TRAIN_SAMPLES)
    }
    assert result.returncode == 0, result.stderr
    assert totals == {(0, 1): 30, (1, 2): 22}
    assert len({p.resource[s.DL_JOB_ID] for p in collector.points(m.DL_TRAIN_SAMPLES)}) == 1
    assert len([batch for run in place.runs() for batch in read_metrics(run)]) == 2


def test_a_killed_drain_is_followed_by_one_that_samples_on(place, collector):
    """Training does not notice; what the first one wrote can be read, and the second one writes beside it."""
    process = place.start(UNTIL_TOLD, **to(collector, place))
    (drain,) = wait_until(lambda: len(found := place.drains()) == 1 and found)
    wait_until(
        lambda: [f for run in place.runs() for f in run.glob("hosts/*/metrics-00001.arrows") if f.stat().st_size]
    )
    drain.kill()
    wait_until(
        lambda: [f for run in place.runs() for f in run.glob("hosts/*/metrics-00002.arrows") if f.stat().st_size]
    )
    enough(place, process)
    drained(place)

    (batch,) = read_metrics(place.runs()[0])
    (spans,) = place.spans()
    steps = int((place.folder / "steps").read_text())
    assert spans.is_rank_step.sum() == steps
    assert len(batch.of(m.SYSTEM_MEMORY_LIMIT)) > 1
    (samples,) = collector.latest(m.DL_TRAIN_BATCHES).values()
    assert 0 < samples.value <= steps


def test_a_collector_that_takes_no_metrics_is_complained_about_once(place, tmp_path):
    """One sentence in the drain's log says how to switch it off; spans arrive all the same."""
    with metrics_collector(tmp_path, with_metrics=False) as collector:
        process = place.start(UNTIL_TOLD, **to(collector, place, OTEL_METRIC_EXPORT_INTERVAL="20"))
        log = wait_until(lambda: [p.read_text() for p in place.rings.glob("*.log") if p.stat().st_size])
        enough(place, process)
        drained(place)

    (said,) = log
    assert "OTEL_METRICS_EXPORTER=none" in said
    assert said.count("metrics do not get to") == 1


def test_what_the_collector_did_not_take_in_time_is_in_the_run_s_last_line(place):
    """It takes connections and does not answer: the drain ends all the same, and says what is lost to it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/metrics"
        place.run(SHORT, OTEL_DLTRACE="1", OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=url)
        drained(place)
    (summary,) = read_summaries(place.runs()[0])

    assert summary_line(summary["summary"]).partition("; ")[2] == (
        f"the last metrics did not get to {url} in time, and are lost to it"
    )


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        pytest.param({"OTEL_METRIC_EXPORT_INTERVAL": "0"}, "OTEL_METRIC_EXPORT_INTERVAL='0'", id="interval 0"),
        pytest.param({"OTEL_METRIC_EXPORT_INTERVAL": "often"}, "OTEL_METRIC_EXPORT_INTERVAL='often'", id="no number"),
        pytest.param(
            {"OTEL_METRICS_EXPORTER": "pigeon"}, "OTEL_METRICS_EXPORTER: no exporter called", id="no such exporter"
        ),
        pytest.param(
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "nowhere"}, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", id="no URL"
        ),
        pytest.param({"OTEL_DLTRACE_DRAIN": "thread"}, "the drain is a thread of this process", id="a thread"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_spans_go_on(env, sentence, place, collector):
    """Training is untouched, and no metrics are sent."""
    result = place.run(SHORT, **to(collector, place, **env))
    drained(place)

    assert result.returncode == 0
    assert sum(line.startswith(f"otel_dltrace: {sentence}") for line in result.stderr.splitlines()) == 1
    assert [int(batch.is_rank_step.sum()) for batch in place.spans()] == [4]
    assert collector.points() == []


def test_without_psutil_there_is_a_sentence(place):
    """Not a series of zeros."""
    place.write("import sys; sys.modules['psutil'] = None", "fake/sitecustomize.py")
    result = place.run(SHORT, OTEL_DLTRACE_METRICS="1", PYTHONPATH=str(place.folder / "fake"))
    drained(place)

    assert result.returncode == 0
    assert result.stderr.count("needs psutil, which is missing: pip install psutil") == 1
    assert [
        name for batch in read_metrics(place.runs()[0]) for name in batch.metrics if name.startswith("system")
    ] == []


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, None, id="nothing is said"),
        pytest.param({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1"}, None, id="for traces alone"),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_METRICS_EXPORTER": "none"}, None, id="none"),
        pytest.param(
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"},
            MetricSettings(OtlpSettings("http://h:1/v1/metrics", signal=choice.METRICS), (), 60_000, 30_000),
            id="the common endpoint",
        ),
        pytest.param(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m:2/x",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_METRIC_EXPORT_INTERVAL": "1500.5",
                "OTEL_METRIC_EXPORT_TIMEOUT": "700",
            },
            MetricSettings(OtlpSettings("http://m:2/x", signal=choice.METRICS), (), 1500.5, 700),
            id="its own",
        ),
    ],
)
def test_where_metrics_go_is_what_the_variables_say(env, expected):
    """The variables for metrics win over the common ones; without any, nothing is sent."""
    assert MetricSettings.from_env(env) == expected


def test_an_interval_of_nothing_says_what_to_write():
    """The message names the variable, the value and a good one."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_METRIC_EXPORT_INTERVAL": "0"}

    with pytest.raises(ConfigError, match=r"^OTEL_METRIC_EXPORT_INTERVAL='0' is not a number .*: write 60000"):
        MetricSettings.from_env(env)


def test_the_console_exporter_prints_what_the_collector_would_get(place):
    """Chosen by name, as for spans, and to the program's own standard output."""
    result = place.run(SHORT, OTEL_DLTRACE="1", OTEL_METRICS_EXPORTER="console")
    drained(place)

    assert result.returncode == 0, result.stderr
    assert m.DL_TRAIN_SAMPLES in result.stdout


def test_under_run_the_console_is_the_terminal_as_well(place):
    """What metrics print is not taken for the run directories, for which `run` asks the drain."""
    program = ["--", sys.executable, str(place.write(SHORT))]
    result = place.command("run", "--no-report", *program, OTEL_METRICS_EXPORTER="console")

    assert m.DL_TRAIN_SAMPLES in result.stdout
    assert result.stderr.splitlines() == [
        f"otel-dltrace: 8 spans recorded, none lost; in {place.runs()[0].name}",
    ]
