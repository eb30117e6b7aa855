"""Where requests go, by OpenTelemetry's variables: good values are followed, bad ones are a sentence with a cure."""

import pytest

from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.model.errors import ConfigError
from tests.support.otlp_ways import PROTOCOLS, settings_for


@pytest.mark.parametrize(
    ("env", "endpoint", "tls"),
    [
        pytest.param({"ENDPOINT": "http://h:4318"}, "http://h:4318/v1/traces", False, id="base"),
        pytest.param({"ENDPOINT": "https://h/otlp/"}, "https://h/otlp/v1/traces", True, id="base with a path"),
        pytest.param({"TRACES_ENDPOINT": "http://h:1/x"}, "http://h:1/x", False, id="for traces, as it is"),
        pytest.param({"TRACES_ENDPOINT": "http://h:1"}, "http://h:1/", False, id="for traces, the root"),
        pytest.param({"ENDPOINT": "http://a", "TRACES_ENDPOINT": "http://b/t"}, "http://b/t", False, id="traces win"),
        pytest.param({"ENDPOINT": "http://h:4317", "PROTOCOL": "grpc"}, "h:4317", False, id="grpc http"),
        pytest.param({"ENDPOINT": "https://h", "PROTOCOL": "grpc"}, "h:443", True, id="grpc https"),
        pytest.param({"ENDPOINT": "http://[::1]:7", "PROTOCOL": "grpc"}, "[::1]:7", False, id="grpc IPv6"),
        pytest.param({"ENDPOINT": "h:4317", "PROTOCOL": "grpc"}, "h:4317", True, id="grpc without scheme"),
        pytest.param({"ENDPOINT": "me:pass@h:4317", "PROTOCOL": "grpc"}, "h:4317", True, id="grpc with a password"),
        pytest.param({"ENDPOINT": "h:4317/v1/traces", "PROTOCOL": "grpc"}, "h:4317", True, id="grpc with a path"),
        pytest.param({"ENDPOINT": "[::1]/", "PROTOCOL": "grpc"}, "[::1]", True, id="grpc IPv6 without scheme"),
        pytest.param({"ENDPOINT": "unix:/run/o.sock", "PROTOCOL": "grpc"}, "unix:/run/o.sock", True, id="grpc file"),
        pytest.param(
            {"ENDPOINT": "h:4317", "PROTOCOL": "grpc", "INSECURE": "true"}, "h:4317", False, id="grpc insecure"
        ),
        pytest.param(
            {"ENDPOINT": "http://h:4317", "PROTOCOL": "http/protobuf", "TRACES_PROTOCOL": "grpc"},
            "h:4317",
            False,
            id="protocol for traces",
        ),
        pytest.param(
            {"ENDPOINT": "unix:///run/otel.sock", "PROTOCOL": "grpc", "INSECURE": "True"},
            "unix:///run/otel.sock",
            False,
            id="grpc over a socket file",
        ),
    ],
)
def test_the_endpoint_follows_the_specification(env, endpoint, tls):
    """Path, port and TLS come from the URL and the protocol as OpenTelemetry says."""
    settings = OtlpSettings.from_env({f"OTEL_EXPORTER_OTLP_{name}": value for name, value in env.items()})
    assert settings is not None
    assert (settings.endpoint, settings.tls) == (endpoint, tls)


def test_every_variable_counts_and_the_one_for_traces_wins(tmp_path):
    """What is set for traces replaces what is set for all signals, an empty value counts as unset."""
    for name in ("ca.pem", "key.pem", "cert.pem"):
        (tmp_path / name).touch()
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://h",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=all",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "Authorization=%20Bearer%20x=%2C, ,b = c,b=d",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3.5",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem"),
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(tmp_path / "key.pem"),
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(tmp_path / "cert.pem"),
    }
    assert OtlpSettings.from_env(env) == OtlpSettings(
        endpoint="https://h/v1/traces",
        protocol="http/protobuf",
        headers=(("authorization", "Bearer x=,"), ("b", "d")),
        timeout_s=3.5,
        gzip=True,
        tls=True,
        certificate=tmp_path / "ca.pem",
        client_key=tmp_path / "key.pem",
        client_certificate=tmp_path / "cert.pem",
    )


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, id="empty"),
        pytest.param({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h"}, id="another signal"),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "none"}, id="switched off"),
    ],
)
def test_without_an_endpoint_nothing_is_sent(env):
    """The embedded default is the run directory alone."""
    assert OtlpSettings.from_env(env) is None


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("ENDPOINT", "localhost:4318", "ENDPOINT='localhost:4318' is not a URL: write http://host:4318 or https"),
        ("ENDPOINT", "http://u:pw@h:x", "ENDPOINT='http://h:x' is not a URL (Port could not be cast"),
        ("ENDPOINT", "http://a b:4318", "ENDPOINT='http://a b:4318' is not a URL (a space in the host): write http"),
        ("ENDPOINT", "u:pw@h:4318", "ENDPOINT='h:4318' is not a URL: write http://host:4318 or https"),
        ("PROTOCOL", "http/json", "PROTOCOL='http/json' is not a protocol we speak: write grpc or http/protobuf"),
        ("TRACES_TIMEOUT", "10s", "TRACES_TIMEOUT='10s' is not a number of seconds above 0: write 10"),
        ("TIMEOUT", "nan", "TIMEOUT='nan' is not a number of seconds above 0"),
        ("TIMEOUT", "0", "TIMEOUT='0' is not a number of seconds above 0"),
        ("COMPRESSION", "zstd", "COMPRESSION='zstd' is not a compression we know: write gzip or none"),
        ("INSECURE", "yes", "INSECURE='yes' is neither true nor false"),
        ("CERTIFICATE", "/no/such.pem", "CERTIFICATE='/no/such.pem' is not a file that can be read"),
        ("CERTIFICATE", "x" * 300, f"CERTIFICATE='{'x' * 300}' is not a file that can be read"),
        ("CLIENT_KEY", f"-----BEGIN KEY-----\n{'secret' * 60}", "CLIENT_KEY has the text of a PEM file as its value"),
        ("CLIENT_KEY", __file__, "CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE need each other"),
        ("HEADERS", "a=b,secret", "HEADERS: entry 2 is not name=value: write name=value,name2=value2"),
        ("HEADERS", "a=secret%0d%0ax", "HEADERS: the value of entry 1 ('a') is not printable ASCII"),
    ],
)
def test_a_bad_value_is_named_with_its_cure(variable, value, sentence):
    """The sentence names the variable, the value unless it is a secret, and what to write instead."""
    with pytest.raises(ConfigError) as raised:
        settings_for("http://h:4318", **{variable: value}) if variable != "ENDPOINT" else settings_for(value)
    assert f"OTEL_EXPORTER_OTLP_{sentence}" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "pw" not in str(raised.value)


def test_a_header_that_grpc_does_not_know_is_a_bad_setting():
    """HTTP does; gRPC would fail at each request."""
    with pytest.raises(ConfigError, match="_HEADERS: gRPC takes no header 'x!y': use only letters, digits") as raised:
        settings_for("http://h:4317", "grpc", HEADERS="a=b,x!y=secret")
    assert "secret" not in str(raised.value)


def test_an_address_without_a_scheme_is_one_that_grpc_can_dial():
    """It takes a port above the last one for another, and says that nobody answers there."""
    with pytest.raises(ConfigError, match="_ENDPOINT='h:70000' is not a URL"):
        settings_for("u:secret@h:70000", "grpc")


def test_secrets_stay_out_of_the_repr():
    """A log line may show the settings, never a token or a password."""
    settings = settings_for("https://user:secret@h:1/x?key=secret", HEADERS="authorization=Bearer secret", TIMEOUT="2")
    assert repr(settings) == "OtlpSettings('https://h:1/x/v1/traces', http/protobuf, headers: authorization)"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_damaged_certificate_is_a_bad_setting(tmp_path, protocol):
    """It is found when connecting, not taken for a collector that is away."""
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot be used"):
        connect(settings_for("https://127.0.0.1:1", protocol, CERTIFICATE=str(tmp_path / "ca.pem")))
