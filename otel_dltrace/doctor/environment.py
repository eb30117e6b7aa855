"""What the environment says: which variables act, which do nothing, which cannot be used."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from otel_dltrace.doctor.variables import CHROME_NUMBERS, OBEYED, OF_THE_SDK, known_to_opentelemetry
from otel_dltrace.export.choice import DELAY_S, delay_s, exporters
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.otlp.settings import OtlpSettings, public
from otel_dltrace.instrument.registry import TABLES
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding
from otel_dltrace.model.numbers import share, size
from otel_dltrace.settings.config import SWITCH, VARIABLES, Config
from otel_dltrace.settings.known import OWN, UNKNOWN, nearest
from otel_dltrace.settings.process import no_attributes
from otel_dltrace.settings.said import said
from otel_dltrace.settings.switch import INSTRUMENTOR_PREFIX, SDK_DISABLED, is_sdk_disabled, is_switched_on
from otel_dltrace.settings.viewers import VIEWERS, viewer_url

AREA = "environment"
_OUR_PREFIX = "dltrace"
_PREFIXES = ("OTEL_", "DLTRACE")
_SAMPLER, _STEP_SAMPLER = "OTEL_TRACES_SAMPLER", "dltrace_step"
_INSTRUMENTORS = [INSTRUMENTOR_PREFIX + source for source in TABLES]
_PLUGINS = {
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": (_INSTRUMENTORS, "leaves nothing out"),
    _SAMPLER: ([_STEP_SAMPLER], "the SDK uses its default sampler"),
    "OTEL_PYTHON_ID_GENERATOR": ([_OUR_PREFIX], "the SDK does not start"),
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": ([_OUR_PREFIX], "adds nothing"),
}
"""Which names of ours each variable takes, and what another one does."""
_BYTEPS = "BYTEPS_"
_FOLDERS = (VARIABLES["directory"], VARIABLES["ring_directory"])
_PASSWORD = re.compile(r"//[^/\s]*@")
_SECRET = re.compile(r"TOKEN|PASSWORD|SECRET|AUTHORIZATION|API_?KEY")
"""What is in the names of variables that hold one; none of ours does."""
_NAME = re.compile(r"\w+")
_OF_MILLISECONDS = re.compile(r"OTEL_EXPORTER_OTLP_((TRACES|METRICS)_)?TIMEOUT=\d{4,}")
"""The specification means milliseconds, and OpenTelemetry's SDK for Python, which we do as, seconds."""
_UNTRACED, _UNMEASURED = "with it, programs run untraced", "with it, no metrics are sent; spans are"


def check(env: Mapping[str, str]) -> list[Finding]:
    """Return what the variables in *env* do, one finding for each, and whether tracing is on."""
    set_here = {name: value for name, value in sorted(env.items()) if name.startswith(_PREFIXES) and value.strip()}
    bad = [*_bad_values(env), *_not_found(env), *_no_pairs(env)]
    named = {found.group() for finding in bad if (found := _NAME.match(finding.what))}
    fine = [name for name in set_here if name not in named]
    return [_switch(env), *(_variable(name, set_here[name]) for name in fine), *bad]


def _switch(env: Mapping[str, str]) -> Finding:
    try:
        if is_switched_on(env):
            return Finding(AREA, FINE, f"tracing is on in programs started with this environment{_as(env)}")
        if said(env, SWITCH) and is_switched_on({**env, SDK_DISABLED: ""}):
            what = f"{SWITCH}={env[SWITCH]} asks for tracing, and {SDK_DISABLED}={env[SDK_DISABLED]} forbids it"
            return Finding(AREA, PROBLEM, what, f"unset {SDK_DISABLED} to trace")
    except ConfigError as error:
        return Finding(AREA, PROBLEM, str(error), "tracing is off until it can be read")
    if is_sdk_disabled(env):
        what = f"tracing is off in programs started with this environment: {SDK_DISABLED}=true forbids it"
        return Finding(AREA, FINE, what, f"unset {SDK_DISABLED}, and set {SWITCH}=1")
    cure = f"{SWITCH}=1 switches it on, and so does: otel-dltrace run -- PROGRAM"
    return Finding(AREA, FINE, "tracing is off in programs started with this environment", cure)


def _as(env: Mapping[str, str]) -> str:
    return "" if said(env, SWITCH) else ", since BytePS's own variables ask for it"


def _variable(name: str, value: str) -> Finding:
    near = nearest(name, [*OWN, *OBEYED])  # itself, where it is one of them
    shown = f"{name}={_shown(near or name, value)}"
    if _OF_MILLISECONDS.match(shown):
        return Finding(AREA, NOTE, f"{shown} is in seconds, as in OpenTelemetry's SDK", "write 10 for ten seconds")
    if name in OWN or name in OBEYED:
        return Finding(AREA, FINE, shown)
    if name in OF_THE_SDK:
        return Finding(AREA, FINE, f"{shown}, {OF_THE_SDK[name]}")
    if name in known_to_opentelemetry():
        return Finding(AREA, FINE, f"{shown} is for OpenTelemetry's SDK, and does nothing here")
    cure = f"did you mean {near}?" if near else "`otel-dltrace run --help` lists the variables"
    if name.startswith("OTEL_") and not name.startswith(SWITCH) and not near:
        return Finding(AREA, FINE, f"{shown} is not ours")
    return Finding(AREA, PROBLEM, f"{shown} {UNKNOWN}", cure)


def _shown(name: str, value: str) -> str:
    """Return *value*, of the variable *name* or one misspelt from it, less its secrets: of headers, the names stay."""
    if _SECRET.search(name) or "-----BEGIN" in value:  # a key in place of its file
        return "..."
    if name.endswith("HEADERS"):
        parts = (entry.partition("=") for entry in value.split(","))
        return ",".join(f"{header.strip()}=..." if equals else "..." for header, equals, _ in parts)
    if name.endswith(("ENDPOINT", "_URL")):
        return public(value)
    return _PASSWORD.sub("//", value)


def _bad_values(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield each variable that cannot be used; each is tried alone, so that one does not hide another."""
    ours = {name: value for name, value in env.items() if name.startswith((f"{SWITCH}_", _BYTEPS)) and value.strip()}
    alone = [{name: value} for name, value in ours.items() if name.startswith(SWITCH)]
    found: dict[str, str] = {}
    for part in [*alone, ours]:
        try:
            Config.from_env(part).check_writable(part)
        except ConfigError as error:
            found[str(error)] = _UNTRACED
    readers: tuple[tuple[Callable[[Mapping[str, str]], object], str], ...] = (
        (exporters, _UNTRACED),
        (OtlpSettings.from_env, _UNTRACED),
        (MetricSettings.from_env, _UNMEASURED),
        (delay_s, f"with it, spans wait {DELAY_S:g} s to go out together"),
        *((partial(viewer_url, name=name), "with it, `otel-dltrace open` needs --url") for name in VIEWERS),
        *((partial(size, name=name), "with it, its default is used") for name in CHROME_NUMBERS),
    )
    if said(env, _SAMPLER) == _STEP_SAMPLER:
        readers += ((partial(share, name=f"{_SAMPLER}_ARG"), "with it, the SDK uses its default sampler"),)
    for read, effect in readers:
        try:
            read(env)
        except ConfigError as error:
            found.setdefault(str(error), effect)
    for sentence, effect in found.items():
        if not sentence.startswith(VARIABLES["directory"]):  # the host's checks say that
            yield Finding(AREA, PROBLEM, sentence, effect)


def _no_pairs(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield each entry of ``OTEL_RESOURCE_ATTRIBUTES`` that is left out."""
    for sentence in no_attributes(env):
        yield Finding(AREA, PROBLEM, sentence, "write name=value,name2=value2")


def _not_found(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield each name like ours by which a variable asks for a plugin, or leaves one out, and that nothing has."""
    for variable, (ours, effect) in _PLUGINS.items():
        for name in map(str.strip, env.get(variable, "").split(",")):
            if name.lower().startswith(_OUR_PREFIX) and name not in ours:
                near = nearest(name, ours)
                cure = f"did you mean {near}?" if near else f"write {'one of ' * (len(ours) > 1)}{', '.join(ours)}"
                yield Finding(AREA, PROBLEM, f"{variable}: {name} is not one of our names, and {effect}", cure)


def config_of(env: Mapping[str, str]) -> Config:
    """Return the configuration that *env* describes, without the variables in it that cannot be used.

    Raises:
        ConfigError: There is no folder at all that can be written.
    """
    left = dict(env)
    while True:
        try:
            config = Config.from_env(left)
            config.check_writable(left)
        except ConfigError as error:
            _mend(left, str(error))
        else:
            return config


def as_asked(env: Mapping[str, str], config: Config) -> Config:
    """Return *config*, in which `config_of` may have put other folders, with those that *env* asks for."""
    named = {variable: value for variable in _FOLDERS if (value := said(env, variable))}
    try:
        asked = Config.from_env(named)
    except ConfigError:  # one is no folder at all
        return config
    return replace(config, directory=asked.directory, ring_directory=asked.ring_directory)


def _mend(left: dict[str, str], sentence: str) -> None:
    """Take the variable that *sentence* is about out of *left*; where it is a default folder, name another.

    Each call takes a variable away, or names a folder that no later one takes: there is an end.
    """
    found = _NAME.match(sentence)
    name = found.group() if found else ""
    elsewhere = _elsewhere()
    if name in _FOLDERS and left.get(name) == elsewhere:
        raise ConfigError(f"not even {elsewhere} can be written: set TMPDIR to a folder that can be")
    if left.pop(name, None) is not None:
        return
    if name in _FOLDERS:  # where we are cannot be written, or /dev/shm
        left[name] = elsewhere
        return
    rest = [one for one in left if one not in _FOLDERS]
    if not rest:
        raise ConfigError(sentence)
    # What is wrong follows from others: from BytePS's, which say one thing together, or from we do not know which.
    theirs = [one for one in rest if name.startswith(_BYTEPS) and one.startswith(_BYTEPS)]
    for one in theirs or rest:
        del left[one]


def _elsewhere() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError("no folder can be written: set TMPDIR to one that can be") from None
