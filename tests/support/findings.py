"""What the doctor is told of a collector, and which of its findings are problems."""

from otel_dltrace.model.findings import PROBLEM, Finding

TOKEN = "authorization=Bearer%20"


def otlp(where: str, protocol: str = "http/protobuf", **more: str) -> dict[str, str]:
    """Return the variables that send to *where*."""
    env = {"ENDPOINT": where, "PROTOCOL": protocol, **more}
    return {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in env.items()}


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict == PROBLEM]
