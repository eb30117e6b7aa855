"""64 ranks through sidecar, router, two gateways and Jaeger on this machine: ``python -m benchmarks collector``.

Eight simulated hosts of eight ranks (`_load`) send steps of 120 spans a rank to one sidecar, as fast as it takes
them; all the collectors run with the configurations of collector-config/, everything is kept, and what stands for
Tempo drops it. A round sends some steps and waits until Jaeger has them. Rates count from the first request to the
last span that the level has accepted. CPU is that of each process, from a round's first request until Jaeger has
the last span (and the level's own share of gzip: collectors compress what they hand on). After each round Jaeger is
asked for every trace: all span ids there, none twice, and all from one gateway.
"""

import gzip
import re
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from benchmarks._load import hosts, trace_of
from benchmarks._stats import median_of, ranged, table
from otel_dltrace.export.otlp.outcome import Verdict
from otel_dltrace.export.otlp.settings import GRPC, OtlpSettings
from otel_dltrace.export.otlp.transport import Transport, connect
from tests.support import servers

HOSTS, RANKS_EACH = 8, 8
STEPS = 10
"""Of a round."""
PATIENCE_S = 120.0
GATEWAY = "k8s.pod.name"
"""The attribute by which a span says which gateway it came through."""
LEVELS = ("sidecar", "router", "gateways", "Jaeger")


@dataclass
class Chain:
    """What runs."""

    sidecar: servers.Collector
    router: servers.Collector
    gateways: list[servers.Collector]
    jaeger: servers.Jaeger

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds of each level so far."""
        return {name: sum(map(_cpu, level)) for name, level in self._levels()}

    def memory(self) -> dict[str, int]:
        """Return the bytes that each level has in memory, of the gateways the larger."""
        return {name: max(map(_memory, level)) for name, level in self._levels()}

    def _levels(self) -> Iterator[tuple[str, list[servers.Server]]]:
        return zip(LEVELS, ([self.sidecar], [self.router], [*self.gateways], [self.jaeger]), strict=True)

    def wait(self, metric: str, count: int) -> None:
        """Wait until the gateways' own *metric* says *count* spans, both together."""
        what = f"{count:,} spans in {metric.partition('{')[0]}"
        servers.wait_until(lambda: self._total(metric) >= count, PATIENCE_S, what)

    def _total(self, metric: str) -> float:
        return sum(_own_metric(gateway.env["OWN_METRICS_PORT"], metric) for gateway in self.gateways)


def _process(server: servers.Server) -> psutil.Process:
    assert server.process is not None
    return psutil.Process(server.process.pid)


def _cpu(server: servers.Server) -> float:
    times = _process(server).cpu_times()
    return times.user + times.system


def _memory(server: servers.Server) -> int:
    return int(_process(server).memory_info().rss)


def _own_metric(port: str, metric: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{metric}.* (\S+)$", text, re.MULTILINE))


@contextmanager
def chain(folder: Path, decision_wait: str) -> Iterator[Chain]:
    """Run sidecar, router, two gateways, Jaeger and what stands for Tempo."""
    with ExitStack() as stack:
        jaeger = stack.enter_context(servers.jaeger(folder))
        tempo = _drop(folder)
        stack.enter_context(servers.running(tempo))
        gateways = []
        for i in range(2):
            gateway = servers.configured(
                "gateway",
                folder / f"gateway-{i}",
                TEMPO_ENDPOINT=_address(tempo.grpc),
                JAEGER_ENDPOINT=_address(jaeger.grpc),
                OTEL_RESOURCE_ATTRIBUTES=f"{GATEWAY}=gateway-{i}",
                OWN_METRICS="normal",
                OWN_METRICS_PORT=str(servers.free_port()),
                KEEP_PERCENT="100",
                DECISION_WAIT=decision_wait,
                MEMORY_LIMIT_MIB="2048",
            )
            stack.enter_context(servers.running(gateway))
            gateways.append(gateway)
        addresses = ", ".join(_address(gateway.grpc) for gateway in gateways)
        router = servers.configured("gateway-router", folder / "router", GATEWAYS=f"[{addresses}]")
        stack.enter_context(servers.running(router))
        sidecar = servers.configured("sidecar", folder / "sidecar", GATEWAY_ENDPOINT=_address(router.grpc))
        stack.enter_context(servers.running(sidecar))
        yield Chain(sidecar, router, gateways, jaeger)


def _address(url: str) -> str:
    return url.removeprefix("http://")


def _drop(folder: Path) -> servers.Collector:
    """Return a collector that drops what it gets."""
    address = f"127.0.0.1:{servers.free_port()}"
    config = folder / "drop.yaml"
    config.write_text(
        f"""
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "{address}", max_recv_msg_size_mib: 16}}}}}}}}
exporters: {{nop: {{}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{traces: {{receivers: [otlp], exporters: [nop]}}}}
"""
    )
    return servers.Collector("otelcol", config, folder / "drop.log", {}, None, f"http://{address}")


# -- a round ------------------------------------------------------------------------------------


@dataclass
class Seen:
    """A number per round, and what was found in Jaeger."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    memory: Counter[str] = field(default_factory=Counter)
    spans: int = 0
    traces: int = 0
    lost: int = 0
    doubled: int = 0
    through: Counter[str] = field(default_factory=Counter)
    parted: int = 0
    size: float = 0.0
    packed: float = 0.0


class Load:
    """The hosts, and their way to the sidecar."""

    def __init__(self, steps: int, endpoint: str) -> None:
        self.steps = steps
        self.hosts = hosts(HOSTS, RANKS_EACH)
        self.transports: list[Transport] = [
            connect(OtlpSettings(_address(endpoint), GRPC, timeout_s=60)) for _ in self.hosts
        ]
        self.step = 0

    def encode(self) -> tuple[list[list[bytes]], dict[str, set[int]]]:
        """Return the bodies that each host sends in this round, and the span ids of each trace."""
        bodies: list[list[bytes]] = [[] for _ in self.hosts]
        traces: dict[str, set[int]] = {}
        for step in range(self.step, self.step + self.steps):
            ids = traces.setdefault(trace_of(self.hosts[0], step), set())
            for host, mine in zip(self.hosts, bodies, strict=True):
                requests, spans = host.requests(step)
                ids.update(spans)
                mine += [request.body for request in requests]
        self.step += self.steps
        return bodies, traces

    def send(self, bodies: Sequence[Sequence[bytes]]) -> None:
        """Send all *bodies*, each host in order and all hosts at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            for _ in pool.map(_send_all, self.transports, bodies):
                pass  # raises what one of them has raised

    def close(self) -> None:
        """Give the connections back."""
        for transport in self.transports:
            transport.close()


def _send_all(transport: Transport, bodies: Sequence[bytes]) -> None:
    """Send *bodies* as the drain does: what is refused for now is sent again."""
    for body in bodies:
        while (outcome := transport.send(body, 60)).verdict is not Verdict.ACCEPTED:
            if outcome.verdict is Verdict.REFUSED:
                raise RuntimeError(f"the sidecar refuses: {outcome.message}")
            time.sleep(0.05)


def one_round(running: Chain, load: Load, seen: Seen) -> None:
    """Send steps, wait for them, and ask Jaeger for them."""
    bodies, traces = load.encode()
    spans = sum(map(len, traces.values()))
    seen.size = sum(len(body) for mine in bodies for body in mine) / spans
    seen.packed = len(gzip.compress(bodies[0][0])) / len(bodies[0][0]) * seen.size
    before, seen.spans = running.cpu(), seen.spans + spans
    rates, began = {}, time.monotonic()
    load.send(bodies)
    rates["sidecar"] = spans / (time.monotonic() - began)
    running.wait("otelcol_receiver_accepted_spans", seen.spans)
    rates["gateways"] = spans / (time.monotonic() - began)
    running.wait('otelcol_exporter_sent_spans.*exporter="otlp_grpc/jaeger"', seen.spans)
    after = running.cpu()
    for name, rate in rates.items():
        seen.rates.setdefault(name, []).append(rate)
    for name in LEVELS:
        seen.cpu.setdefault(name, []).append((after[name] - before[name]) * 1e6 / spans)
    seen.memory |= Counter(running.memory())
    for trace, ids in traces.items():
        _look_up(running.jaeger, trace, ids, seen)


def _look_up(jaeger: servers.Jaeger, trace: str, ids: set[int], seen: Seen) -> None:
    """Compare what Jaeger has of *trace* with *ids*."""
    answer = jaeger.get(f"/api/traces/{trace}")
    data = answer["data"][0] if answer else {"spans": [], "processes": {}}
    found = Counter(int(span["spanID"], 16) for span in data["spans"])
    ways = {tag["value"] for p in data["processes"].values() for tag in p["tags"] if tag["key"] == GATEWAY}
    seen.traces += 1
    seen.lost += len(ids - found.keys())
    seen.doubled += sum(found.values()) - len(found)
    seen.parted += len(ways) != 1
    seen.through.update(ways)


# -- the table ----------------------------------------------------------------------------------


def report(seen: Seen, steps: int) -> str:
    """Return the tables in markdown."""
    rounds = len(seen.cpu[LEVELS[0]])
    rows = []
    for name in LEVELS:
        cpu, rates = median_of(seen.cpu[name]), seen.rates.get(name)
        rows.append(
            [
                name,
                ranged(cpu, rounds, ".2f"),
                f"{1e6 / cpu(range(rounds)):,.0f}",
                ranged(median_of(rates), rounds, ",.0f") if rates else "",
                f"{seen.memory[name] / (1 << 20):,.0f}",
            ]
        )
    head = [
        f"level, {rounds} rounds of {steps} steps of 64 ranks",
        "CPU us a span (95 %)",
        "spans/s of a core",
        "accepted, spans/s (95 %)",
        "RSS at most, MiB",
    ]
    ways = ", ".join(f"{name} {count}" for name, count in sorted(seen.through.items()))
    return (
        table(head, rows)
        + f"\n\nSent {seen.spans:,} spans in {seen.traces:,} traces, {seen.size:.0f} bytes a span, {seen.packed:.0f} "
        + f"with gzip. Lost: {seen.lost:,}. There twice: {seen.doubled:,}. Traces that went through both gateways: "
        + f"{seen.parted:,} ({ways})."
    )


def measure(rounds: int, steps: int = STEPS, decision_wait: str = "5s") -> Seen:
    """Run *rounds* rounds of *steps* steps; the gateways decide after *decision_wait*."""
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="dltrace-bench-") as folder, chain(Path(folder), decision_wait) as running:
        load = Load(steps, running.sidecar.grpc)
        try:
            for _ in range(rounds):
                one_round(running, load, seen)
        finally:
            load.close()
    return seen


def run(rounds: int) -> str:
    """Measure and return the tables in markdown."""
    try:
        return report(measure(rounds), STEPS)
    except pytest.skip.Exception as absent:
        return f"Not measured: {absent}."
