"""All checks, in the order in which a person would look."""

from collections.abc import Callable, Mapping

from otel_dltrace.doctor import environment, frameworks, host, installation, runs
from otel_dltrace.model.findings import PROBLEM, Finding
from otel_dltrace.record.guard import text_of, tried


def examine(env: Mapping[str, str], *, import_frameworks: bool = True) -> list[Finding]:
    """Return everything that is found under *env*; a check that fails is a finding itself."""
    config = environment.config_of(env)
    asked = environment.as_asked(env, config)
    checks: dict[str, Callable[[], list[Finding]]] = {
        "environment": lambda: environment.check(env),
        "versions": installation.versions,
        "entry points": installation.entry_points,
        ".pth": installation.pth,
        "others": lambda: installation.others(env),
        "frameworks": lambda: frameworks.check(import_them=import_frameworks),
        "endpoint": lambda: _endpoint(env),
        "clock": host.clocks,
        "rings": lambda: host.shared_memory(asked),
        "run directory": lambda: host.run_directory(env, config),
        "fork": lambda: host.forks(env, config),
        "last run": lambda: runs.check(asked),
    }
    return [finding for area, check in checks.items() for finding in _made(area, check)]


def _made(area: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    found = tried(check)
    if not isinstance(found, Exception):
        return found
    what = f"this could not be checked: {type(found).__name__}: {text_of(found)}"
    return [Finding(area, PROBLEM, what, "fix that first; if there is nothing to fix, open an issue")]


def _endpoint(env: Mapping[str, str]) -> list[Finding]:
    from otel_dltrace.doctor import endpoint  # what it needs may be missing: the doctor is asked for that, too

    return endpoint.check(env)
