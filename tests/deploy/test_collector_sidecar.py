"""The sidecar's configuration on the real Collector: what it has acknowledged arrives, whoever dies on the way."""

import pytest

from otel_dltrace.export.otlp.delivery import Delivery
from tests.support import servers
from tests.support.collector_traffic import bulk, contents, data_of, ids, real_run, scrape, send, sender


@pytest.fixture
def sink(tmp_path):
    """Give the next collector: it writes each span down before it acknowledges."""
    (tmp_path / "sink").mkdir()
    with servers.collector(tmp_path / "sink") as it:
        yield it


def sidecar_to(collector, folder, **env):
    return servers.configured("sidecar", folder / "sidecar", GATEWAY_ENDPOINT=collector.grpc[7:], **env)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_real_run_passes_unchanged(sink, tmp_path, protocol):
    """Each span once, with every attribute that it had."""
    with servers.running(sidecar := sidecar_to(sink, tmp_path)):
        send(sidecar.grpc if protocol == "grpc" else sidecar.http, real_run(), tmp_path, protocol)
        sink.wait_for(len(ids(data_of(real_run()))))

    assert ids(sink.traces()) == ids(data_of(real_run()))
    assert contents(sink.traces()) == contents(data_of(real_run()))


def test_nothing_is_lost_when_gateway_and_sidecar_are_killed(sink, tmp_path):
    """The gateway is away, the sidecar is killed with all of it in its queue: it is on disk, and what came is there."""
    bodies = list(bulk(60, 100))
    sidecar = sidecar_to(sink, tmp_path)
    with servers.running(sidecar):
        send(sidecar.grpc, bodies[:20], tmp_path)
        sink.kill()
        send(sidecar.grpc, bodies[20:40], tmp_path)
        sidecar.kill()
        sidecar.start()
        send(sidecar.grpc, bodies[40:], tmp_path)
        sidecar.kill()
        sink.start()
        sidecar.start()
        sink.wait_for(6000)

    # What was under way at a kill comes again: under the same id.
    assert set(ids(sink.traces())) == set(ids(data_of(bodies)))


def test_who_sends_while_the_sidecar_is_dead_sends_again(sink, tmp_path):
    """Our own sender keeps what it has until the sidecar is back; everything arrives."""
    bodies = list(bulk(60, 50))
    sidecar = sidecar_to(sink, tmp_path)
    with servers.running(sidecar):
        way = sender(sidecar.grpc, tmp_path)
        for number, body in enumerate(bodies):
            if number == 30:
                sidecar.kill()
            way.submit(body, 50, number)
        servers.wait_until(lambda: way.delivery().trouble, what="the sender's notice")
        sidecar.start()
        servers.wait_until(lambda: way.delivery() == Delivery(3000, trouble=way.delivery().trouble), what="delivery")
        way.close(5.0)
        sink.wait_for(3000)

    assert set(ids(sink.traces())) == set(ids(data_of(bodies)))


def test_nothing_is_lost_when_the_gateway_restarts(sink, tmp_path):
    """A gateway that is ended in order hands on what it holds; what is sent meanwhile waits in the sidecar."""
    bodies = [*real_run(), *bulk(20, 40)]
    ends = {"TEMPO_ENDPOINT": sink.grpc[7:], "JAEGER_ENDPOINT": sink.grpc[7:]}
    quick = {"DECISION_WAIT": "3s", "METRICS_FLUSH": "100ms", "KEEP_PERCENT": "100"}
    gateway = servers.configured("gateway", tmp_path / "gateway", **ends, **quick)
    sidecar = sidecar_to(gateway, tmp_path)
    with servers.running(gateway), servers.running(sidecar):
        send(sidecar.grpc, bodies[:10], tmp_path)
        servers.wait_until(lambda: counted(gateway) == len(ids(data_of(bodies[:10]))), what="the first half")
        gateway.stop()
        send(sidecar.grpc, bodies[10:], tmp_path)
        gateway.start()
        servers.wait_until(lambda: set(ids(sink.traces())) == set(ids(data_of(bodies))), what="all spans")
        servers.wait_until(lambda: set(ids(sink.traces()).values()) == {2}, what="Tempo's and Jaeger's copy")


def counted(gateway):
    """Return how many spans a gateway has counted."""
    return sum(scrape(gateway.env["PROMETHEUS_ENDPOINT"]).get("traces_span_metrics_calls_total", {}).values())


def test_the_disk_is_given_back(sink, tmp_path):
    """After a long outage the queue's files shrink again."""
    sidecar = sidecar_to(sink, tmp_path)
    sink.kill()
    with servers.running(sidecar):
        send(sidecar.grpc, list(bulk(40, 20, text="weight" * 2000)), tmp_path)
        full = queue_size(sidecar)
        sink.start()
        sink.wait_for(800)
        sidecar.stop()
        sidecar.start()
        assert queue_size(sidecar) < full / 10
    assert full > 5_000_000


def queue_size(sidecar):
    """Return the bytes of the files of its queue."""
    folder = sidecar.log.parent / "queue"
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_does_not_fit_is_refused_and_not_dropped(sink, tmp_path):
    """A full queue says so to the sender, which keeps the rest in its own spill."""
    bodies = list(bulk(40, 20, text="weight" * 2000))
    sidecar = sidecar_to(sink, tmp_path, QUEUE_BYTES="2000000")
    sink.kill()
    with servers.running(sidecar):
        way = sender(sidecar.grpc, tmp_path)
        for number, body in enumerate(bodies):
            way.submit(body, 20, number)
        servers.wait_until(lambda: "sending queue is full" in way.delivery().trouble, what="a full queue")
        sink.start()
        servers.wait_until(lambda: way.delivery().accepted == 800, what="delivery")
        way.close(5.0)
        sink.wait_for(800)

    assert set(ids(sink.traces())) == set(ids(data_of(bodies)))


def test_the_pod_is_named_by_the_environment(sink, tmp_path):
    """What the downward API puts there is added to every resource, and what the sender says itself stays."""
    pod = "k8s.pod.name=trainer-0,k8s.node.name=node-7,service.name=collector"
    with servers.running(sidecar := sidecar_to(sink, tmp_path, OTEL_RESOURCE_ATTRIBUTES=pod)):
        send(sidecar.grpc, real_run(), tmp_path)
        sink.wait_for(len(ids(data_of(real_run()))))

    added = {"k8s.pod.name": "trainer-0", "k8s.node.name": "node-7"}
    sent = {it: {**who, **added} for it, _, who in contents(data_of(real_run()))}
    assert {it: who for it, _, who in contents(sink.traces())} == sent


def test_host_metrics_come_from_the_sidecar(tmp_path):
    """They reach Prometheus through the gateway, with the host's name."""
    gateway = servers.configured("gateway", tmp_path / "gateway", **absent_back_ends())
    with servers.running(gateway), servers.running(sidecar_to(gateway, tmp_path, HOST_METRICS_INTERVAL="500ms")):
        address = gateway.env["PROMETHEUS_ENDPOINT"]
        found = servers.wait_until(lambda: scrape(address).get("system_memory_utilization_ratio"), what="host metrics")

    labels = {frozenset(name for name, _ in series) for series in found}
    assert labels == {frozenset({"job", "service_name", "host_name", "state"})}


def absent_back_ends():
    """Return addresses where nobody listens."""
    return {name: f"127.0.0.1:{servers.free_port()}" for name in ("TEMPO_ENDPOINT", "JAEGER_ENDPOINT")}
