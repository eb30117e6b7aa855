"""Whether the collector is there, speaks OTLP, and lets us in."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from otel_dltrace.export.choice import METRICS, names_otlp
from otel_dltrace.export.otlp.diagnosis import ENDPOINT, PROTOCOL, by_own_names, diagnose, doubt
from otel_dltrace.export.otlp.outcome import Verdict
from otel_dltrace.export.otlp.settings import GRPC, OtlpSettings
from otel_dltrace.export.probe import Answer, certificate, host_and_port, other_ways, probe
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding
from otel_dltrace.settings.said import said

AREA = "endpoint"
LONGEST_S = 5.0
"""One attempt takes no longer, whatever the environment allows."""
_SOON = timedelta(days=14)
_WAY = ("_ENDPOINT", "_PROTOCOL", "_INSECURE", "_HEADERS", "_CERTIFICATE", "_CLIENT_KEY", "_COMPRESSION")
"""How the names of those variables end that say where data go, and how."""


def check(env: Mapping[str, str]) -> list[Finding]:
    """Return what the collectors that *env* names answer to an empty request."""
    return [*_traces(env), *_metrics(env)]


def _traces(env: Mapping[str, str]) -> list[Finding]:
    try:
        settings = OtlpSettings.from_env(env)
        return _asked(settings, env) if settings else [_nowhere(env)]
    except ConfigError as error:
        return [Finding(AREA, PROBLEM, str(error))]


def _metrics(env: Mapping[str, str]) -> list[Finding]:
    """Return what is to say of a way that metrics have of their own; the common one may well be for spans alone."""
    try:
        settings = OtlpSettings.from_env(env, METRICS)
        is_own = settings is not None and any(common.endswith(_WAY) for common, _ in settings.renamed)
        found = _asked(settings, env) if settings and is_own else []
    except ConfigError:  # what cannot be used of the variables is told with them
        return []
    return [replace(finding, area="metrics endpoint") for finding in found if finding.area == AREA]


def _asked(settings: OtlpSettings, env: Mapping[str, str]) -> list[Finding]:
    answer = probe(settings, LONGEST_S)
    return [*_proxy(settings, env), *_certificate(settings), _judge(settings, answer)]


def _nowhere(env: Mapping[str, str]) -> Finding:
    if not names_otlp(env):
        return Finding(
            AREA,
            FINE,
            f"OTEL_TRACES_EXPORTER={env['OTEL_TRACES_EXPORTER']} leaves OTLP out, so nothing is sent to a collector",
        )
    cure = f"{ENDPOINT}=http://localhost:4318 sends them to a collector as well"
    return Finding(AREA, FINE, "no endpoint is set, so spans stay in the run directory", cure)


def _judge(settings: OtlpSettings, answer: Answer) -> Finding:
    outcome = answer.outcome
    if outcome.verdict is Verdict.ACCEPTED:
        return _judge_accepted(settings, answer)
    diagnosis = diagnose(settings, outcome.message)
    is_clear = answer.is_spoken or re.search("refused|proxy", outcome.message)
    works = None if is_clear else _what_works(settings)
    return Finding(AREA, PROBLEM, diagnosis.what, _how(settings, works) if works else diagnosis.cure)


def _judge_accepted(settings: OtlpSettings, answer: Answer) -> Finding:
    outcome = answer.outcome
    if outcome.answered_in:
        return Finding(AREA, PROBLEM, *doubt(settings, outcome.answered_in))
    if outcome.rejected:
        what = f"{settings.where} answers, but rejects part of it ({outcome.rejected} spans: {outcome.message})"
        return Finding(AREA, PROBLEM, what, "see the collector's log for why")
    if outcome.message:
        return Finding(
            AREA, NOTE, f"{settings.where} answers OTLP over {settings.protocol}, and says: {outcome.message}"
        )
    took = f"{answer.seconds * 1000:,.0f} ms"
    return Finding(AREA, FINE, f"{settings.where} answers OTLP over {settings.protocol} ({took})")


def _what_works(settings: OtlpSettings) -> OtlpSettings | None:
    """Return another way of speaking to the same address that it answers."""
    return next((way for way in other_ways(settings) if probe(way, LONGEST_S / 2).is_spoken), None)


def _how(settings: OtlpSettings, works: OtlpSettings) -> str:
    parts = []
    if works.protocol != settings.protocol:
        parts.append(f"set {PROTOCOL}={works.protocol}")
    if works.tls != settings.tls:
        parts.append(f"write {'https' if works.tls else 'http'}:// in {ENDPOINT}")
    return by_own_names(settings, f"{' and '.join(parts)}: that gets an answer")


def _certificate(settings: OtlpSettings) -> list[Finding]:
    try:
        shown = certificate(settings, LONGEST_S)
    except OSError:
        return []  # the request itself says whether that matters: requests and gRPC may trust others than we do here
    if shown is None:
        return []
    what = f"{shown.subject}, signed by {shown.issuer}, is good until {shown.expires:%Y-%m-%d}"
    is_short = shown.expires - datetime.now(timezone.utc) < _SOON
    return [Finding("TLS", NOTE if is_short else FINE, what, "renew it soon" if is_short else "")]


def _proxy(settings: OtlpSettings, env: Mapping[str, str]) -> list[Finding]:
    from requests.utils import should_bypass_proxies

    if settings.protocol == GRPC:  # it reads small letters alone
        proxy = _first(env, "grpc_proxy", "https_proxy", "http_proxy")
        none, url = _first(env, "no_grpc_proxy", "no_proxy"), f"//{settings.endpoint.removeprefix('dns:///')}"
    else:
        proxy = _named(env, "https_proxy" if settings.tls else "http_proxy") or _named(env, "all_proxy")
        none, url = _named(env, "no_proxy"), settings.endpoint
    if not proxy or host_and_port(settings) is None or should_bypass_proxies(url, no_proxy=none):
        return []
    what = f"requests to {settings.where} go through the proxy {proxy.rpartition('@')[2]}"
    variable = "no_proxy" if settings.protocol == GRPC else "NO_PROXY"
    return [Finding(AREA, NOTE, what, f"name its host in {variable} if they should not")]


def _first(env: Mapping[str, str], *names: str) -> str:
    return next((value for name in names if (value := said(env, name))), "")


def _named(env: Mapping[str, str], name: str) -> str:
    """Return the value of *name* in *env*; in small letters it wins, as with requests."""
    return env.get(name, env.get(name.upper(), "")).strip()
