"""What the OTEL_EXPORTER_OTLP_* variables say about where spans go, checked once."""

import math
import os
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from otel_dltrace.export.choice import TRACES, names_otlp
from otel_dltrace.model.errors import ConfigError

GRPC = "grpc"
HTTP = "http/protobuf"
_GRPC_RESOLVERS = {"dns", "ipv4", "ipv6", "unix", "unix-abstract"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST_AND_PATH = re.compile(r"((?:\[[^]]*\]|[^:/]+)(?::\d+)?)(?:/.*)?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_METADATA_NAME = re.compile(r"[0-9a-z_.-]+")
"""What gRPC lets a header be called, of what HTTP does."""
_SHORTEST_SECRET = 4
"""Characters; shorter ones are in any sentence."""
_BOOLEANS = {"true": True, "false": False}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """Where spans go and how; made by `from_env`.

    Header values are secrets: they stay out of the repr, and out of every message.
    """

    endpoint: str
    """HTTP: the whole URL. gRPC: what grpcio dials, ``host:port``."""
    protocol: str = HTTP
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 10.0
    """The longest one attempt may take."""
    gzip: bool = False
    tls: bool = False
    certificate: Path | None = None
    client_key: Path | None = None
    client_certificate: Path | None = None
    signal: str = TRACES
    """What goes there, as it stands in the names of variables."""
    renamed: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Which variables have their form for this signal set, and how that is called."""

    def __repr__(self) -> str:
        """Return the settings with the names of the headers only, and no password of the URL."""
        names = ", ".join(name for name, _ in self.headers)
        gzip = ", gzip" if self.gzip else ""
        return f"OtlpSettings({self.where!r}, {self.protocol}{gzip}, headers: {names or 'none'})"

    @property
    def where(self) -> str:
        """The endpoint without user name, password and query, fit for messages."""
        return public(self.endpoint)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What a server may repeat and no message may, longer ones first: headers' values, a URL's password, query.

        A token is one without the word before it, too. What is shorter than `_SHORTEST_SECRET` is none.
        """
        values = [value for _, value in self.headers]
        words = [word for value in values for word in value.split()[1:]]
        url = urlsplit(self.endpoint if self.protocol == HTTP else "")
        name, password = unquote(url.username or ""), unquote(url.password or "")
        basic = b64encode(f"{name}:{password}".encode()).decode() if password else ""
        asked = [value for _, value in parse_qsl(url.query)]
        told = {*values, *words, password, url.password or "", basic, url.query, *asked}
        return tuple(sorted((each for each in told if len(each) >= _SHORTEST_SECRET), key=len, reverse=True))

    @property
    def has_files(self) -> bool:
        """Whether certificates are read from files, which may be renewed while a program runs."""
        return bool(self.certificate or self.client_certificate)

    @classmethod
    def from_env(cls, env: Mapping[str, str], signal: str = TRACES) -> "OtlpSettings | None":
        """Return what *env* asks for, or None where it names no endpoint: nothing is sent then.

        The form of a variable for *signal*, as ``OTEL_EXPORTER_OTLP_TRACES_*``, wins over the common one; an empty
        value counts as unset.

        Raises:
            ConfigError: A value cannot be used.
        """
        variables = _Variables(env, signal)
        name, endpoint = variables.find("ENDPOINT")
        if not endpoint or not names_otlp(env, signal):
            return None
        protocol = variables.read("PROTOCOL", _protocol, HTTP)
        insecure = variables.read("INSECURE", _boolean, False)
        target, tls = _grpc_target(name, endpoint, insecure) if protocol == GRPC else _http_url(name, endpoint, signal)
        settings = cls(
            endpoint=target,
            protocol=protocol,
            headers=variables.read("HEADERS", _metadata if protocol == GRPC else _headers, ()),
            timeout_s=variables.read("TIMEOUT", _seconds, 10.0),
            gzip=variables.read("COMPRESSION", _compression, False),
            tls=tls,
            certificate=variables.read("CERTIFICATE", _file, None),
            client_key=variables.read("CLIENT_KEY", _file, None),
            client_certificate=variables.read("CLIENT_CERTIFICATE", _file, None),
            signal=signal,
            renamed=variables.renamed(),
        )
        if (settings.client_key is None) != (settings.client_certificate is None):
            key, certificate = variables.find("CLIENT_KEY")[0], variables.find("CLIENT_CERTIFICATE")[0]
            msg = f"{key} and {certificate} need each other, but only one is set: set both, or none"
            raise ConfigError(msg)
        return settings


@dataclass(frozen=True, slots=True)
class _Variables:
    """The environment, asked by the last part of a variable's name."""

    env: Mapping[str, str]
    signal: str

    def find(self, last: str) -> tuple[str, str]:
        """Return the variable that counts and its value, "" where unset."""
        common = f"OTEL_EXPORTER_OTLP_{last}"
        for name in (f"OTEL_EXPORTER_OTLP_{self.signal}_{last}", common):
            if value := self.env.get(name, "").strip():
                return name, value
        return common, ""

    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Return the common and the own name of each variable that counts under its own."""
        own, common = f"OTEL_EXPORTER_OTLP_{self.signal}_", "OTEL_EXPORTER_OTLP_"
        return tuple((name.replace(own, common), name) for name in self.env if name.startswith(own) and self.env[name])

    def read(self, last: str, parse: Callable[[str, str], Value], default: Value) -> Value:
        name, value = self.find(last)
        return parse(name, value) if value else default


def _http_url(name: str, value: str, signal: str) -> tuple[str, bool]:
    url = _split(name, value)
    if url.scheme not in _DEFAULT_PORTS or not url.hostname:
        raise ConfigError(f"{name}={public(value)!r} is not a URL: write http://host:4318 or https://host:4318")
    if f"_{signal}_" in name:  # used as it is; a URL without a path means the root
        return url._replace(path=url.path or "/").geturl(), url.scheme == "https"
    return url._replace(path=url.path.rstrip("/") + f"/v1/{signal.lower()}").geturl(), url.scheme == "https"


def _grpc_target(name: str, value: str, insecure: bool) -> tuple[str, bool]:
    if "://" not in value:  # gRPC takes a name and a password for a part of the host, and tells of it in errors
        target = re.sub(r"^[^/]*@", "", value)
        if bare := _HOST_AND_PATH.fullmatch(target):  # a path says nothing to gRPC, as in a URL
            _split(name, target)
            target = bare[1]
        return target, not insecure
    url = _split(name, value)
    if url.scheme in _GRPC_RESOLVERS:
        return value, not insecure
    if url.scheme not in _DEFAULT_PORTS or not url.hostname:
        msg = f"{name}={public(value)!r} is not a gRPC endpoint: write http://host:4317, https://host:4317 or host:4317"
        raise ConfigError(msg)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{url.port or _DEFAULT_PORTS[url.scheme]}", url.scheme == "https"


def _split(name: str, value: str) -> SplitResult:
    try:
        url = urlsplit(value if "://" in value else f"//{value}")
        _ = url.port  # checked only when it is read
    except ValueError as error:
        raise ConfigError(f"{name}={public(value)!r} is not a URL ({error}): write http://host:port") from None
    if re.search(r"\s", url.hostname or ""):  # `urlsplit` takes it
        raise ConfigError(f"{name}={public(value)!r} is not a URL (a space in the host): write http://host:port")
    return url


def public(endpoint: str) -> str:
    """Return *endpoint*, with or without a scheme, less its user name, password and query: they may be secrets."""
    return re.sub(r"(^|(?<=//))[^/?#]*@|[?#].*", "", endpoint)


def _protocol(name: str, value: str) -> str:
    if value.lower() not in (GRPC, HTTP):
        raise ConfigError(f"{name}={value!r} is not a protocol we speak: write {GRPC} or {HTTP}")
    return value.lower()


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in _BOOLEANS:
        raise ConfigError(f"{name}={value!r} is neither true nor false: write one of the two")
    return _BOOLEANS[value.lower()]


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name}={value!r} is not a number of seconds above 0: write 10, for example")
    return seconds


def _compression(name: str, value: str) -> bool:
    if value.lower() not in ("gzip", "none"):
        raise ConfigError(f"{name}={value!r} is not a compression we know: write gzip or none")
    return value.lower() == "gzip"


def _file(name: str, value: str) -> Path | None:
    if "-----BEGIN" in value:  # of a key it is a secret
        raise ConfigError(f"{name} has the text of a PEM file as its value: name the file, or unset it")
    path = Path(value)
    if not os.path.isfile(path) or not os.access(path, os.R_OK):  # noqa: PTH113  -- `Path`'s raises in a closed folder
        raise ConfigError(f"{name}={value!r} is not a file that can be read: name a PEM file, or unset it")
    return path


def _headers(name: str, value: str) -> tuple[tuple[str, str], ...]:
    """Parse ``name=value,name2=value2``, values percent-encoded as in W3C baggage."""
    headers = {}
    for place, entry in enumerate(value.split(","), 1):
        if not entry.strip():
            continue
        key, equals, text = entry.partition("=")
        key, text = unquote(key.strip()).lower(), unquote(text).strip()  # HTTP has no spaces around a value
        # Values are secrets, so a message says the place of an entry and never what stands there.
        if not equals or not _HEADER_NAME.fullmatch(key):
            raise ConfigError(f"{name}: entry {place} is not name=value: write name=value,name2=value2")
        if not text.isascii() or not text.isprintable():
            raise ConfigError(f"{name}: the value of entry {place} ({key!r}) is not printable ASCII: encode it")
        headers[key] = text
    return tuple(headers.items())


def _metadata(name: str, value: str) -> tuple[tuple[str, str], ...]:
    headers = _headers(name, value)
    for key, _ in headers:
        if not _METADATA_NAME.fullmatch(key):
            raise ConfigError(f"{name}: gRPC takes no header {key!r}: use only letters, digits, '_', '-' and '.'")
    return headers
