"""Requests reach a real collector by every way there is."""

import random
from collections.abc import Iterator
from functools import partial
from shutil import copy

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.renewed import Renewed
from otel_dltrace.export.otlp.transport import connect
from tests.support import servers
from tests.support.certificates import make_certificates
from tests.support.otlp_ways import (
    ACCEPTED,
    PROTOCOLS,
    SERVER_FILES,
    body_of,
    connected,
    endpoint_of,
    ids,
    request_of,
    settings_for,
    traces_with,
)


@pytest.fixture(scope="module", params=["plain", "tls", "mtls"])
def secured(request, tmp_path_factory, certificates) -> Iterator[tuple[servers.Collector, dict[str, str]]]:
    """A collector, and the variables that its clients need."""
    tls, client = {}, {}
    if request.param != "plain":
        tls = {"cert_file": certificates.server, "key_file": certificates.server_key}
        client = {"CERTIFICATE": certificates.authority}
    if request.param == "mtls":
        tls["client_ca_file"] = certificates.authority
        client |= {"CLIENT_CERTIFICATE": certificates.client, "CLIENT_KEY": certificates.client_key}
    with servers.collector(tmp_path_factory.mktemp(request.param), tls) as collector:
        yield collector, client


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_arrive_field_by_field(secured, protocol, compression):
    """Whatever protocol, security and compression, the collector writes down what was sent."""
    collector, client = secured
    number = random.SystemRandom().getrandbits(62) | 1
    request = request_of(number, number + 1)
    with connected(settings_for(endpoint_of(collector, protocol), protocol, COMPRESSION=compression, **client)) as way:
        assert way.send(request.SerializeToString(), 10.0) == ACCEPTED

    key = number.to_bytes(8, "big")
    servers.wait_until(lambda: key in {span.span_id for span in collector.spans()}, what="the span in the file")
    assert traces_with(collector.traces(), key) == TracesData(resource_spans=request.resource_spans)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_cannot_prove_itself_gets_nothing(tmp_path, certificates, protocol):
    """With an authority that did not sign its certificate the request stays here, to be sent when that is mended."""
    other = tmp_path / "other"
    other.mkdir()
    tls = {"cert_file": certificates.server, "key_file": certificates.server_key}
    with servers.collector(tmp_path, tls) as collector:
        stranger = {"CERTIFICATE": make_certificates(other).authority, "TIMEOUT": "2"}
        with connected(settings_for(endpoint_of(collector, protocol), protocol, **stranger)) as way:
            assert way.send(body_of(1), 2.0).verdict is Verdict.RETRY
        assert collector.spans() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_certificates_that_are_renewed_are_read_again(tmp_path, certificates, protocol):
    """Half written at first, then of an authority that the collector does not know, at last the right ones."""
    for name in ("other", "mine"):
        (tmp_path / name).mkdir()
    mine, other = tmp_path / "mine", make_certificates(tmp_path / "other")
    files = {"CLIENT_CERTIFICATE": mine / "client.pem", "CLIENT_KEY": mine / "client_key.pem"}
    for path in files.values():
        path.write_bytes(b"")
    tls = {name: getattr(certificates, of) for name, of in SERVER_FILES.items()}
    with servers.collector(tmp_path, tls) as collector:
        own = {"CERTIFICATE": certificates.authority, **{name: str(path) for name, path in files.items()}}
        settings = settings_for(endpoint_of(collector, protocol), protocol, **own)
        way = Renewed(partial(connect, settings), settings.has_files)
        outcomes = [way.send(body_of(1), 10.0)]
        for signed in (other, certificates):
            for path in files.values():
                copy(signed.folder / path.name, path)
            outcomes.append(way.send(body_of(1), 10.0))
        way.close()

    assert [outcome.verdict.value for outcome in outcomes] == ["retry", "retry", "accepted"]
    assert "cannot be used" in outcomes[0].message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_token_opens_the_collector(tmp_path, protocol, monkeypatch):
    """The header arrives as set, whatever ~/.netrc says; a wrong token is refused for good and said."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with servers.collector(tmp_path, token="t0ken") as collector:
        endpoint = endpoint_of(collector, protocol)
        with connected(settings_for(endpoint, protocol, HEADERS="Authorization=Bearer%20wrong")) as way:
            refused = way.send(body_of(1), 10.0)
        with connected(settings_for(endpoint, protocol, HEADERS="Authorization=Bearer%20t0ken")) as way:
            accepted = way.send(body_of(2), 10.0)
        code = "UNAUTHENTICATED" if protocol == "grpc" else "HTTP 401"
        message = f"{code}: provided authorization does not match expected scheme or token"
        assert (refused, accepted) == (Outcome(Verdict.REFUSED, message=message), ACCEPTED)
        assert ids(collector.wait_for(1)) == {2}


def test_the_certificate_asked_for_wins_over_the_one_of_requests(tmp_path, certificates, monkeypatch):
    """REQUESTS_CA_BUNDLE is for those who name no certificate."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", make_certificates(other).authority)
    with (
        servers.collector(
            tmp_path, {"cert_file": certificates.server, "key_file": certificates.server_key}
        ) as collector,
        connected(settings_for(collector.http, CERTIFICATE=certificates.authority)) as way,
    ):
        assert way.send(body_of(1), 10.0) == ACCEPTED
