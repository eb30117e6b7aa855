"""Print a configuration of the OpenTelemetry Collector, to run as it is or to copy into any cluster.

    otel-dltrace collector --print sidecar > sidecar.yaml
    otelcol-contrib --config sidecar.yaml

docs/collector.md says which is for what, and which variables each reads.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from otel_dltrace.model.errors import DltraceError

COLLECTORS = {
    "sidecar": "beside the ranks of a host or pod: keeps everything on disk until the gateway has it",
    "gateway-router": "in front of several gateways: all spans of a trace go to one of them",
    "gateway": "counts all spans, keeps the steps that are worth looking at, hands them to Tempo and Jaeger",
    "jaeger-by-rank": "before a Jaeger: each rank is a service there, with a colour of its own",
    "standalone": "one for all: a file and Jaeger",
}
OPTIONAL = {
    "gateways-by-dns": "over gateway-router: gateways are all addresses of one name",
    "gateway-on-disk": "over gateway: its queues on a volume",
    "k8s-attributes": "over gateway: labels of pods, from the cluster",
    "kafka": "over gateway: to Kafka as well",
    "clickhouse": "over gateway: to ClickHouse as well",
    "secure": "over gateway and gateway-router: TLS, and only for who shows a certificate",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    names = [*COLLECTORS, *OPTIONAL]
    parser.add_argument("--print", required=True, choices=names, metavar="NAME", dest="name", help="which, see below")
    parser.epilog = f"collectors:\n{_list(COLLECTORS)}\n\ngiven with one more --config:\n{_list(OPTIONAL)}"


def run(args: argparse.Namespace) -> int:
    """Print the file."""
    folder = _folder() / "optional" if args.name in OPTIONAL else _folder()
    file = folder / f"{args.name}.yaml"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DltraceError(f"{file} is not there: the installation is not whole, install us anew") from None
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
