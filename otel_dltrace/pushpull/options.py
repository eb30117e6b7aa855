"""The one place that reads pushpull's variables, from a mapping it is given."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull.folder import SHARED, where_ranks_meet
from otel_dltrace.pushpull.keys import BUILT_IN, HASH_NAMES, MIXED, KeyHash, mixed_share
from otel_dltrace.pushpull.layout import Layout

Env = Mapping[str, str]
BEREFT = "_PUSHPULL_BEREFT"
_HOST, _PORT, _MOST_PORT = "127.0.0.1", 9000, 65_535
_DIGITS = 100
_MOST_PARTITION_BYTES = 1_000_000_000
"""Twice as much has to go into one message of gRPC, which has at most 2 GiB."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM format. With *ca* each side asks the other for a certificate that it signed."""

    certificate: Path | None
    key: Path | None
    ca: Path | None


@dataclass(frozen=True, slots=True)
class Options:
    """What a job's processes agree on, and where they meet."""

    partition_bytes: int = 4_096_000
    credit: int = 0
    """Partitions in flight; 0 is no limit, and first come, first served."""
    key_hash: KeyHash = KeyHash()
    min_compress_bytes: int = 65_536
    compress_threads: int = 1
    asynchronous: bool = False
    timeout_s: float = 300.0
    """How long one process waits for another before it calls that one lost."""
    root: str = f"{_HOST}:{_PORT}"
    """Where server 0 listens, which knows the others."""
    host: str = _HOST
    """The address that this process's server listens at, and tells the others."""
    server: int = 0
    """Which server this process is, if it is one."""
    token: str = ""
    """The job's secret."""
    tls: Tls | None = None
    folder: Path = SHARED
    """Where the local ranks of a worker meet: sockets and shared memory."""
    bereft: Path | None = None
    """The file by which this process tells who launched it that it fails since another one did."""


_DEFAULT = Options()


def read_env(env: Env) -> tuple[Layout, Options]:
    """Return the layout and the options that *env* gives this process.

    Raises:
        ConfigError: A value that cannot be used, or no token.
    """
    layout = Layout(
        worker=_number(env, "DMLC_WORKER_ID", 0),
        num_workers=_number(env, "DMLC_NUM_WORKER", 1, least=1),
        local_rank=_number(env, "BYTEPS_LOCAL_RANK", 0),
        local_size=_number(env, "BYTEPS_LOCAL_SIZE", 1, least=1),
        num_servers=_number(env, "DMLC_NUM_SERVER", 0),
        pcie_switch_size=_number(env, "BYTEPS_PCIE_SWITCH_SIZE", Layout().pcie_switch_size, least=1),
        force_distributed=is_forced(env),
    )
    _check(layout, env)
    options = Options(
        partition_bytes=_number(env, "BYTEPS_PARTITION_BYTES", _DEFAULT.partition_bytes, 1, _MOST_PARTITION_BYTES),
        credit=_number(env, "BYTEPS_SCHEDULING_CREDIT", _DEFAULT.credit),
        key_hash=_hash(env, layout),
        min_compress_bytes=_number(env, "BYTEPS_MIN_COMPRESS_BYTES", _DEFAULT.min_compress_bytes),
        compress_threads=max(1, _number(env, "BYTEPS_THREADPOOL_SIZE", _DEFAULT.compress_threads)),
        asynchronous=_number(env, "BYTEPS_ENABLE_ASYNC", 0) != 0,
        timeout_s=_seconds(env, "PUSHPULL_TIMEOUT", _DEFAULT.timeout_s),
        root=f"{_host(env, 'DMLC_PS_ROOT_URI')}:{_number(env, 'DMLC_PS_ROOT_PORT', _PORT, 1, _MOST_PORT)}",
        host=_host(env, "DMLC_NODE_HOST"),
        server=_number(env, "DMLC_SERVER_ID", _DEFAULT.server, most=max(layout.num_servers, 1) - 1),
        token=env.get("PUSHPULL_TOKEN", ""),
        tls=_tls(env),
        folder=Path(env.get("PUSHPULL_DIR") or _default_folder(env, layout)),
        bereft=_path(env, BEREFT),
    )
    return layout, options


def agreed(layout: Layout, options: Options) -> dict[str, str]:
    """Return what all workers of a job have to have alike, by variable: else their sums would be wrong, or none.

    What follows from a tensor, its size and partitions, is compared when it is pushed.
    """
    return {
        "BYTEPS_LOCAL_SIZE": str(layout.local_size),
        "DMLC_NUM_SERVER": str(layout.num_servers),
        "BYTEPS_KEY_HASH_FN": options.key_hash.name,
        "BYTEPS_BUILT_IN_HASH_COEF": str(options.key_hash.coefficient),
        "BYTEPS_MIXED_MODE_BOUND": str(options.key_hash.bound),
        "BYTEPS_ENABLE_ASYNC": str(int(options.asynchronous)),
    }


def is_forced(env: Env) -> bool:
    """Return whether servers take part with one worker, too.

    Raises:
        ConfigError: What *env* says of it is no number.
    """
    return _number(env, "BYTEPS_FORCE_DISTRIBUTED", 0) == 1


def _check(layout: Layout, env: Env) -> None:
    limits = (
        ("BYTEPS_LOCAL_RANK", layout.local_rank, layout.local_size),
        ("DMLC_WORKER_ID", layout.worker, layout.num_workers),
    )
    for name, value, limit in limits:
        if value >= limit:
            raise ConfigError(f"{name}={value} is too high: with {limit} in all, the highest is {limit - 1}")
    if layout.distributed and not layout.num_servers:
        found = "=0" if env.get("DMLC_NUM_SERVER", "").strip() else " is not set"
        why = "several workers need" if layout.num_workers > 1 else "BYTEPS_FORCE_DISTRIBUTED=1 needs"
        raise ConfigError(f"DMLC_NUM_SERVER{found}: {why} one server or more (--servers of launch)")
    token = env.get("PUSHPULL_TOKEN", "")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("PUSHPULL_TOKEN has characters that cannot be sent, perhaps a newline: use printable ASCII")
    if not token and (layout.distributed or layout.local_size > 1):
        raise ConfigError(
            "PUSHPULL_TOKEN is not set: give all processes of the job the same secret, as the launcher does"
        )


def _number(env: Env, name: str, default: int, least: int = 0, most: int = (1 << 31) - 1) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    # By its length first: Python reads no number of thousands of digits.
    if not text.isdecimal() or len(text) > _DIGITS or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text!r} is not a whole number from {least} to {most}")
    return int(text)


def _seconds(env: Env, name: str, default: float) -> float:
    text = env.get(name, "").strip()
    try:
        value = float(text or default)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e7:
        raise ConfigError(f"{name}={text!r} is not a number of seconds above 0")
    return value


def _path(env: Env, name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None


def _host(env: Env, name: str) -> str:
    """Return a host as it stands before a port: an address of IPv6, as of a Kubernetes pod, in brackets."""
    host = env.get(name) or _HOST
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _hash(env: Env, layout: Layout) -> KeyHash:
    name = env.get("BYTEPS_KEY_HASH_FN") or KeyHash().name
    if _number(env, "BYTEPS_ENABLE_MIXED_MODE", 0):
        name = MIXED
    if name not in HASH_NAMES:
        raise ConfigError(f"BYTEPS_KEY_HASH_FN={name!r} is not one of {', '.join(HASH_NAMES)}")
    if name == BUILT_IN:
        return KeyHash(name, coefficient=_number(env, "BYTEPS_BUILT_IN_HASH_COEF", KeyHash().coefficient))
    return _mixed_hash(env, layout) if name == MIXED else KeyHash(name)


def _mixed_hash(env: Env, layout: Layout) -> KeyHash:
    servers, workers = layout.num_servers, layout.num_workers
    if servers and mixed_share(servers, workers) is None:
        raise ConfigError(
            f"BYTEPS_KEY_HASH_FN='mixed' is for one server beside each worker and at most as many on their own; "
            f"DMLC_NUM_SERVER={servers} and DMLC_NUM_WORKER={workers} are not that"
        )
    bound = _number(env, "BYTEPS_MIXED_MODE_BOUND", KeyHash().bound, least=1)
    if bound < servers:
        raise ConfigError(f"BYTEPS_MIXED_MODE_BOUND={bound} is less than DMLC_NUM_SERVER={servers}")
    return KeyHash(MIXED, bound=bound)


def _tls(env: Env) -> Tls | None:
    certificate, key, ca = (_path(env, name) for name in ("PUSHPULL_TLS_CERT", "PUSHPULL_TLS_KEY", "PUSHPULL_TLS_CA"))
    if certificate is None and key is None and ca is None:
        return None
    if (certificate is None) != (key is None):
        raise ConfigError("PUSHPULL_TLS_CERT and PUSHPULL_TLS_KEY go together: one of them is not set")
    return Tls(certificate, key, ca)


def _default_folder(env: Env, layout: Layout) -> Path:
    """Return a folder that the local ranks of one worker find without being told."""
    name = f"dltrace-pushpull-{os.getuid()}-{env.get('DMLC_PS_ROOT_PORT') or _PORT}-{layout.worker}"
    return where_ranks_meet() / name
