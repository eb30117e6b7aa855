"""Print a configuration of the OpenTelemetry Collector, to run as it is or to copy into any cluster.

    otel-dltrace collector --print sidecar > sidecar.yaml
    otelcol-contrib --config sidecar.yaml

docs/collector.md says what each is for, and which variables it reads.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from otel_dltrace.model.errors import DltraceError

COLLECTORS = {
    "sidecar": "beside the ranks of a host or pod: keeps everything on disk until the gateway has it",
    "gateway-router": "in front of several gateways: sends all spans of a trace to the same one",
    "gateway": "counts all spans, keeps the steps that are worth looking at, sends them to Tempo and Jaeger",
    "jaeger-by-rank": "in front of a Jaeger: turns each rank into a service there, with a colour of its own",
    "standalone": "for a single machine: writes everything to files, and sends spans to Jaeger",
}
OPTIONAL = {
    "gateways-by-dns": "with gateway-router: the gateways are all addresses of one name",
    "gateway-on-disk": "with gateway: keeps its queues on a volume",
    "k8s-attributes": "with gateway: adds labels of pods, from the cluster",
    "kafka": "with gateway: sends to Kafka as well",
    "clickhouse": "with gateway: sends to ClickHouse as well",
    "secure": "with gateway or gateway-router: TLS, and only for senders that show a certificate",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    names = [*COLLECTORS, *OPTIONAL]
    parser.add_argument("--print", required=True, choices=names, metavar="NAME", dest="name", help="which, see below")
    parser.epilog = f"collectors:\n{_list(COLLECTORS)}\n\nextensions, given with a second --config:\n{_list(OPTIONAL)}"


def run(args: argparse.Namespace) -> int:
    """Print the file."""
    folder = _folder() / "optional" if args.name in OPTIONAL else _folder()
    file = folder / f"{args.name}.yaml"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DltraceError(f"{file} is missing: the installation is incomplete, reinstall otel-dltrace") from None
    except OSError as error:
        raise DltraceError(f"{file} cannot be read: {error.strerror or error}") from None
    print(text, end="")
    return 0


def _list(about: Mapping[str, str]) -> str:
    return "\n".join(f"  {name:17}{text}" for name, text in about.items())


def _folder() -> Path:
    """Return where they are: in a wheel inside of the package, in a checkout (``pip install -e``) beside it."""
    package = Path(__file__).parents[1]
    packed = package / "collector-config"
    return packed if packed.is_dir() else package.parent / "collector-config"
