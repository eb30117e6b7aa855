"""Router, gateway and views on the real Collector: traces stay whole, all is counted, what matters is kept."""

import json
import math
import re
import urllib.request
from collections import Counter
from contextlib import ExitStack

import pytest

from otel_dltrace.export.outgoing.as_sent import as_sent
from otel_dltrace.model import semconv as s
from tests.support import servers
from tests.support.certificates import make_certificates
from tests.support.collector_traffic import (
    MS,
    STEPS,
    bulk,
    by_label,
    data_of,
    ids,
    push_pull_job,
    real_run,
    request,
    scrape,
    send,
    span,
)
from tests.support.processes import a_place

QUICK = {"DECISION_WAIT": "1s", "METRICS_FLUSH": "200ms"}


@pytest.fixture
def running():
    """Give what starts servers and ends them after the test."""
    with ExitStack() as stack:

        def start(server):
            stack.enter_context(servers.running(server))
            return server

        yield start


@pytest.fixture
def sinks(tmp_path):
    """Give two collectors that write down what they receive."""
    with ExitStack() as stack:
        folders = [tmp_path / name for name in ("left", "right")]
        for folder in folders:
            folder.mkdir()
        yield [stack.enter_context(servers.collector(folder)) for folder in folders]


def gateway_to(sinks, folder, *overlays, **env):
    ends = {"TEMPO_ENDPOINT": sinks[0].grpc[7:], "JAEGER_ENDPOINT": sinks[1].grpc[7:]}
    return servers.configured("gateway", folder, *overlays, **{**QUICK, **ends, **env})


def router_to(gateways, folder, **env):
    return servers.configured("gateway-router", folder, GATEWAYS=f"[{', '.join(g.grpc[7:] for g in gateways)}]", **env)


def traces(data):
    """Return the ids of the traces in *data*."""
    return {it.trace_id for it in servers.spans_of(data)}


def test_a_real_run_goes_all_the_way(running, sinks, tmp_path):
    """Sidecar, router, two gateways, both ends: every span once at each end."""
    sent = ids(data_of(real_run()))
    gateways = [running(gateway_to(sinks, tmp_path / f"gateway {i}", KEEP_PERCENT="100")) for i in range(2)]
    router = running(router_to(gateways, tmp_path / "router"))
    sidecar = running(servers.configured("sidecar", tmp_path / "sidecar", GATEWAY_ENDPOINT=router.grpc[7:]))
    send(sidecar.http, real_run(), tmp_path, "http/protobuf")
    for sink in sinks:
        sink.wait_for(len(sent))

    assert [ids(sink.traces()) for sink in sinks] == [sent, sent]
    assert all("deprecated" not in it.log.read_text() for it in (*gateways, router, sidecar))


def test_a_live_run_goes_all_the_way(running, sinks, tmp_path):
    """From the drain of a running job: all of its spans at both ends, and its steps' metrics by rank."""
    gateway = running(gateway_to(sinks, tmp_path / "gateway", KEEP_PERCENT="100"))
    router = running(router_to([gateway], tmp_path / "router"))
    sidecar = running(servers.configured("sidecar", tmp_path / "sidecar", GATEWAY_ENDPOINT=router.grpc[7:]))
    with a_place(tmp_path) as place:
        push_pull_job(place, OTEL_EXPORTER_OTLP_ENDPOINT=sidecar.http, OTEL_DLTRACE_METRICS="1")
        place.deliver(OTEL_EXPORTER_OTLP_ENDPOINT=sidecar.http)
        recorded = {int(i).to_bytes(8, "big") for batch in as_sent(place.runs()) for i in batch["span_id"]}
    for sink in sinks:
        sink.wait_for(len(recorded))
    address = gateway.env["PROMETHEUS_ENDPOINT"]
    found = servers.wait_until(lambda: scrape(address).get("dl_step_duration_seconds_count"), what="the metrics")

    assert [set(ids(sink.traces())) for sink in sinks] == [recorded, recorded]
    assert by_label(found, "service_name", "dl_rank") == {("job", "0"): STEPS, ("job", "1"): STEPS}


def test_the_router_keeps_a_trace_on_one_gateway(running, sinks, tmp_path):
    """Requests that mix traces are cut up: no trace is on both, every span is on one, and both have work."""
    bodies = list(bulk(50, 100, traces=80))
    router = running(router_to(sinks, tmp_path / "router"))
    send(router.grpc, bodies, tmp_path)
    servers.wait_until(lambda: sum(len(ids(sink.traces())) for sink in sinks) == 5000, what="all spans")
    left, right = (sink.traces() for sink in sinks)

    assert ids(left) + ids(right) == ids(data_of(bodies))
    assert traces(left) & traces(right) == set()
    assert min(len(traces(left)), len(traces(right))) > 0


def test_a_router_without_gateway_loses_nothing(running, sinks, tmp_path):
    """One gateway is away, then the router is killed: the sidecar has what was not answered."""
    bodies = list(bulk(20, 100, traces=80))
    router = running(router_to(sinks, tmp_path / "router"))
    sidecar = running(servers.configured("sidecar", tmp_path / "sidecar", GATEWAY_ENDPOINT=router.grpc[7:]))
    send(sidecar.grpc, bodies[:10], tmp_path)
    servers.wait_until(lambda: sum(len(ids(sink.traces())) for sink in sinks) == 1000, what="the first half")
    sinks[0].kill()
    send(sidecar.grpc, bodies[10:], tmp_path)
    router.kill()
    sinks[0].start()
    router.start()
    servers.wait_until(lambda: sum(len(ids(sink.traces())) for sink in sinks) == 2000, what="all spans")

    assert traces(sinks[0].traces()) & traces(sinks[1].traces()) == set()


def test_a_gateway_that_restarts_gets_its_part_once(running, sinks, tmp_path):
    """While one is away, only its part is repeated: nothing comes twice, neither here nor on the other one."""
    bodies = list(bulk(10, 100, traces=80))
    router = running(router_to(sinks, tmp_path / "router"))
    sidecar = running(servers.configured("sidecar", tmp_path / "sidecar", GATEWAY_ENDPOINT=router.grpc[7:]))
    sinks[0].stop()
    send(sidecar.grpc, bodies, tmp_path)
    servers.wait_until(lambda: "Exporting failed" in router.log.read_text(), what="the router's notice")
    sinks[0].start()
    servers.wait_until(lambda: sum(len(ids(sink.traces())) for sink in sinks) == 1000, what="all spans")

    assert ids(sinks[0].traces()) + ids(sinks[1].traces()) == ids(data_of(bodies))


def test_gateways_are_found_by_name(running, sinks, tmp_path):
    """Every address of the name is one; the fixed list is out."""
    port = sinks[0].grpc.rpartition(":")[2]
    name = {"GATEWAY_NAME": "localhost", "GATEWAY_PORT": port}
    router = running(servers.configured("gateway-router", tmp_path / "router", "gateways-by-dns", **name))
    send(router.grpc, real_run(), tmp_path)

    assert ids(sinks[0].traces()) == ids(data_of(real_run()))


@pytest.fixture
def counting(running, sinks, tmp_path):
    """Give a gateway that keeps no ordinary trace, and has counted a real run."""
    gateway = running(gateway_to(sinks, tmp_path / "gateway", KEEP_PERCENT="0"))
    send(gateway.grpc, real_run(), tmp_path)
    return gateway


def test_every_span_is_counted_by_rank(counting):
    """Before sampling: as many as were sent, of each name, of each rank of workers and servers."""
    sent = {}
    for resource in data_of(real_run()).resource_spans:
        who = servers.attributes(resource.resource)
        for it in resource.scope_spans[0].spans:
            key = (who[s.SERVICE_NAME], it.name, who[s.DL_ROLE], str(who[s.DL_RANK]))
            sent[key] = sent.get(key, 0) + 1
    labels = ("service_name", "span_name", "dl_role", "dl_rank")

    def calls():
        return by_label(scrape(counting.env["PROMETHEUS_ENDPOINT"]).get("traces_span_metrics_calls_total", {}), *labels)

    servers.wait_until(lambda: sum(calls().values()) == sum(sent.values()), what="all spans counted")
    assert calls() == sent
    everything = scrape(counting.env["PROMETHEUS_ENDPOINT"])
    assert by_label(everything["traces_span_metrics_duration_seconds_count"], *labels) == sent
    buckets = by_label(everything["traces_span_metrics_duration_seconds_bucket"], "le")
    bounds = sorted(float(le) for (le,) in buckets)
    assert (bounds[:4], bounds[-5:]) == ([1e-05, 3e-05, 1e-04, 3e-04], [30, 60, 120, 300, math.inf])
    assert {name for series in everything["traces_span_metrics_calls_total"] for name, _ in series} <= {
        "job",
        "service_name",
        "span_name",
        "status_code",
        *("dl_rank", "dl_role", "dl_phase", "dl_comm_operation", "dl_queue_type"),
    }


def test_pushes_and_pulls_are_edges_of_a_graph(counting):
    """From workers to servers, as many as the servers answered; nothing is left without its other side."""
    data = data_of(real_run())
    answered = {"PUSH": 0, "PULL": 0}
    for it in servers.spans_of(data):
        if it.name in (s.PUSH, s.PULL):
            answered[it.name.upper()] += 1
    labels = ("client", "server", "client_dl_queue_type", "connection_type")
    name = "traces_service_graph_request_total"

    def edges():
        return by_label(scrape(counting.env["PROMETHEUS_ENDPOINT"]).get(name, {}), *labels)

    servers.wait_until(lambda: sum(edges().values()) >= sum(answered.values()), what="the graph")
    (service,) = {servers.attributes(resource.resource)[s.SERVICE_NAME] for resource in data.resource_spans}
    assert edges() == {
        (f"{service}-worker", f"{service}-server", queue_type, ""): number for queue_type, number in answered.items()
    }


def test_a_push_without_its_answer_leads_to_a_server_all_the_same(running, sinks, tmp_path):
    """An imported timeline has the workers' side alone."""
    gateway = running(gateway_to(sinks, tmp_path / "gateway", GRAPH_TTL="1s"))
    send(gateway.grpc, [request([span("PUSH", 1, dl__queue__type="PUSH")])], tmp_path)
    address, labels = gateway.env["PROMETHEUS_ENDPOINT"], ("client", "server", "connection_type")
    found = servers.wait_until(lambda: scrape(address).get("traces_service_graph_request_total"), what="the graph")

    assert set(by_label(found, *labels)) == {("job-worker", "job-server", "virtual_node")}


def test_a_bar_leads_to_traces(running, sinks, tmp_path):
    """What Prometheus reads has ids of traces in it, for a click from a figure to a step."""
    gateway = running(servers.configured("gateway", tmp_path / "gateway", METRICS_FLUSH="3s"))
    send(gateway.grpc, real_run(), tmp_path)
    ask = urllib.request.Request(
        f"http://{gateway.env['PROMETHEUS_ENDPOINT']}/metrics", headers={"Accept": "application/openmetrics-text"}
    )

    def linked():
        with urllib.request.urlopen(ask, timeout=60) as answer:
            return set(re.findall(r'_bucket\{.*# \{.*trace_id="(\w+)"', answer.read().decode()))

    found = servers.wait_until(linked, what="links")
    assert found <= {trace.hex() for trace in traces(data_of(real_run()))}


def step(number, ms=2, *more):
    """Return the request of each of two ranks that were *ms* in a step, rank 1's with *more* spans."""
    ends = ms * MS
    root = span("train.step", number, 0, ends)
    ranks = [[span("rank.step", number, 0, ends), span("forward", number, 0, MS, dl__phase="forward")] for _ in "01"]
    return [request([root, *ranks[0]]), request([*ranks[1], *more], 1)]


PLANTED = {
    "slow": lambda: step(1, 80),
    "error": lambda: step(2, 2, span("all_reduce", 2, error=True)),
    "killed": lambda: step(3, 2, span("push_pull", 3, dl__span__truncated=True)),
    "waits": lambda: step(4, 2, span("wait", 4, 0, 30 * MS)),
    "others wait": lambda: step(5, 2, span("all_reduce", 5, 0, 30 * MS, dl__comm__operation="all_reduce")),
    "long queue": lambda: step(6, 2, span("PUSH", 6, dl__queue__wait=9000)),
}


def test_what_matters_is_kept_whole(running, sinks, tmp_path):
    """Of a hundred steps those with something planted on one rank, with all their spans, at both ends."""
    limits = {"SLOW_STEP_MS": "60", "STRAGGLER_WAIT": "25ms", "QUEUE_WAIT_US": "8000", "KEEP_PERCENT": "0"}
    gateway = running(gateway_to(sinks, tmp_path / "gateway", DECISION_WAIT="3s", **limits))
    planted = [body for make in PLANTED.values() for body in make()]
    dull = [body for number in range(100, 200) for body in step(number)]
    dull += step(200, 2, span("wait", 200, 0, 20 * MS), span("PUSH", 200, dl__queue__wait=7000))
    dull += step(201, 2, span("forward", 201, 0, 40 * MS), span("all_reduce", 201, dl__span__truncated=False))
    send(gateway.grpc, dull[:100] + planted + dull[100:], tmp_path)
    kept = ids(data_of(planted))
    for sink in sinks:
        sink.wait_for(len(kept))
    gateway.stop()  # judges what is left, and hands it on

    assert [ids(sink.traces()) for sink in sinks] == [kept, kept]


def test_a_share_of_the_rest_is_kept(running, sinks, tmp_path):
    """About as many as asked for, each whole."""
    gateway = running(gateway_to(sinks, tmp_path / "gateway", KEEP_PERCENT="30"))
    bodies = [body for number in range(400) for body in step(1000 + number)]
    send(gateway.grpc, bodies, tmp_path)
    gateway.stop()
    kept = sinks[0].traces()

    assert 60 < len(traces(kept)) < 200
    assert ids(kept) == ids(sinks[1].traces())
    assert len(ids(kept)) == 5 * len(traces(kept))


def test_one_end_that_is_away_does_not_stop_the_other(running, sinks, tmp_path):
    """Tempo is not there yet: Jaeger has everything, and Tempo gets it when it comes."""
    sinks[0].kill()
    gateway = running(gateway_to(sinks, tmp_path / "gateway", KEEP_PERCENT="100"))
    sent = ids(data_of(real_run()))
    send(gateway.grpc, real_run(), tmp_path)
    sinks[1].wait_for(len(sent))
    sinks[0].start()
    sinks[0].wait_for(len(sent))

    assert ids(sinks[0].traces()) == sent


def test_with_a_disk_a_kill_loses_nothing_that_was_decided(running, sinks, tmp_path):
    """What waits for Tempo is there again after the gateway was killed."""
    sinks[0].kill()
    gateway = running(gateway_to(sinks, tmp_path / "gateway", "gateway-on-disk", KEEP_PERCENT="100"))
    sent = ids(data_of(real_run()))
    send(gateway.grpc, real_run(), tmp_path)
    sinks[1].wait_for(len(sent))
    gateway.kill()
    sinks[0].start()
    gateway.start()
    sinks[0].wait_for(len(sent))

    assert set(ids(sinks[0].traces())) == set(sent)


def test_more_ends_join_the_others(running, sinks, tmp_path):
    """With Kafka laid over it, absent as it is, a gateway still delivers to the others."""
    gateway = running(gateway_to(sinks, tmp_path / "gateway", "kafka", KEEP_PERCENT="100"))
    send(gateway.grpc, real_run(), tmp_path)
    for sink in sinks:
        sink.wait_for(len(ids(data_of(real_run()))))


def test_who_shows_no_certificate_sends_nothing(running, sinks, tmp_path):
    """A gateway with TLS takes from a router that has a certificate; a sidecar without one keeps its spans."""
    files = make_certificates(tmp_path)
    own = {"TLS_CERT_FILE": files.server, "TLS_KEY_FILE": files.server_key, "TLS_CLIENT_CA_FILE": files.authority}
    shown = {"GATEWAY_CERT_FILE": files.client, "GATEWAY_KEY_FILE": files.client_key}
    trust = {"GATEWAY_INSECURE": "false", "GATEWAY_CA_FILE": files.authority}
    gateway = running(gateway_to(sinks, tmp_path / "gateway", "secure", KEEP_PERCENT="100", **own))
    router = running(router_to([gateway], tmp_path / "router", **trust, **shown))
    send(router.grpc, real_run()[:1], tmp_path)
    stranger = servers.configured("sidecar", tmp_path / "s", GATEWAY_ENDPOINT=gateway.grpc[7:], **trust)
    running(stranger)
    send(stranger.grpc, real_run()[1:2], tmp_path)
    servers.wait_until(lambda: "Exporting failed" in stranger.log.read_text(), what="the refusal")
    gateway.stop()

    assert ids(sinks[0].traces()) == ids(data_of(real_run()[:1]))


def test_gateways_that_are_found_by_name_show_a_certificate_for_it(running, sinks, tmp_path):
    """The router connects to their addresses, which no certificate names."""
    files = make_certificates(tmp_path, "otel-gateway")
    own = {"TLS_CERT_FILE": files.server, "TLS_KEY_FILE": files.server_key, "TLS_CLIENT_CA_FILE": files.authority}
    gateway = running(gateway_to(sinks, tmp_path / "gateway", "secure", KEEP_PERCENT="100", **own))
    name = {"GATEWAY_NAME": "localhost", "GATEWAY_PORT": gateway.grpc.rpartition(":")[2]}
    trust = {"GATEWAY_INSECURE": "false", "GATEWAY_CA_FILE": files.authority, "GATEWAY_SERVER_NAME": "otel-gateway"}
    shown = {"GATEWAY_CERT_FILE": files.client, "GATEWAY_KEY_FILE": files.client_key}
    router = running(
        servers.configured("gateway-router", tmp_path / "router", "gateways-by-dns", **name, **trust, **shown)
    )
    send(router.grpc, real_run(), tmp_path)
    for sink in sinks:
        sink.wait_for(len(ids(data_of(real_run()))))


def test_jaeger_by_rank_names_services_after_ranks(running, tmp_path):
    """Behind it each rank is a service, and a server is another one; the spans are the same."""
    sent = ids(data_of(real_run()))
    with servers.jaeger(tmp_path) as jaeger:
        view = running(servers.configured("jaeger-by-rank", tmp_path / "view", JAEGER_ENDPOINT=jaeger.grpc[7:]))
        first = running(servers.configured("standalone", tmp_path / "first", JAEGER_ENDPOINT=view.grpc[7:]))
        send(first.grpc, real_run(), tmp_path)
        names = servers.wait_until(lambda: three_of(jaeger.get("/api/services")["data"]), what="three services")
        found = sum(len(jaeger.trace(trace.hex()).resource_spans) > 0 for trace in traces(data_of(real_run())))

    assert sorted(names) == ["job rank 0000", "job rank 0001", "job server 0000"]
    assert found == len(traces(data_of(real_run())))
    assert ids(first.traces()) == sent
    kept = {servers.attributes(r.resource)[s.SERVICE_NAME] for r in first.traces().resource_spans}
    assert kept == {"job"}


def test_jaeger_by_rank_leaves_the_name_that_a_resource_has_not(running, sinks, tmp_path):
    """A sender that names no service, or one by a number, is no service of a made-up name."""
    view = running(servers.configured("jaeger-by-rank", tmp_path / "view", JAEGER_ENDPOINT=sinks[0].grpc[7:]))
    unnamed, numbered, named = (data_of([request([span("step", 1)], rank=3)]) for _ in range(3))
    for data in (unnamed, numbered):
        attributes = data.resource_spans[0].resource.attributes
        (name,) = (pair for pair in attributes if pair.key == s.SERVICE_NAME)
        if data is unnamed:
            attributes.remove(name)
        else:
            name.value.int_value = 5
    bodies = [data.SerializeToString() for data in (unnamed, numbered, named)]
    send(view.grpc, bodies, tmp_path)

    sinks[0].wait_for(3)
    found = [servers.attributes(part.resource).get(s.SERVICE_NAME) for part in sinks[0].traces().resource_spans]
    assert Counter(found) == {None: 1, 5: 1, "job rank 0003": 1}


def three_of(names):
    return names if names and len(names) == 3 else None


def test_metrics_have_a_place_everywhere(running, sinks, tmp_path):
    """A drain's metrics reach Prometheus with rank and host through all three; alone they reach a file."""
    gateway = running(gateway_to(sinks, tmp_path / "gateway"))
    router = running(router_to([gateway], tmp_path / "router"))
    sidecar = running(servers.configured("sidecar", tmp_path / "sidecar", GATEWAY_ENDPOINT=router.grpc[7:]))
    alone = running(servers.configured("standalone", tmp_path / "alone", JAEGER_ENDPOINT=sinks[1].grpc[7:]))
    for collector in (sidecar, alone):
        send_metrics(collector.http)
    address = gateway.env["PROMETHEUS_ENDPOINT"]
    found = servers.wait_until(lambda: scrape(address).get("dl_step_duration_seconds"), what="the metric")
    labels = ("service_name", "host_name", "dl_rank", "dl_role")
    assert by_label(found, *labels) == {("job", "node-0", str(rank), "worker"): 0.25 + rank for rank in range(2)}
    lines = servers.wait_until((tmp_path / "alone" / "metrics.jsonl").read_text, what="the file")
    assert json.loads(lines) == METRICS


def _attribute(name, value):
    return {"key": name, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}


def _metric(rank):
    who = {
        "service.name": "job",
        "service.instance.id": f"rank {rank}",
        "host.name": "node-0",
        "dl.role": "worker",
        "dl.rank": rank,
    }
    points = {"dataPoints": [{"asDouble": 0.25 + rank, "timeUnixNano": "1790000000000000000"}]}
    return {
        "resource": {"attributes": [_attribute(*each) for each in who.items()]},
        "scopeMetrics": [{"scope": {}, "metrics": [{"name": "dl.step.duration", "unit": "s", "gauge": points}]}],
    }


METRICS = {"resourceMetrics": [_metric(rank) for rank in range(2)]}


def send_metrics(endpoint):
    """Send one metric of two ranks."""
    body = json.dumps(METRICS).encode()
    post = urllib.request.Request(f"{endpoint}/v1/metrics", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=60) as answer:
        assert answer.status == 200
