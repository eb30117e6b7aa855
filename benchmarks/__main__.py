"""Run benchmarks and print their tables in markdown: ``python -m benchmarks [record] [wire] [ddp] [--quick]``."""

import argparse
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version

from benchmarks import bench_ddp, bench_record, bench_wire

BENCHMARKS = {
    "record": (bench_record.run, 200, 20),
    "wire": (bench_wire.run, 60, 10),
    "ddp": (bench_ddp.run, 300, 10),
}
"""What runs, and its rounds in full and with ``--quick``."""


def about() -> str:
    """Return what was measured on what."""
    with open("/proc/cpuinfo") as file:  # noqa: PTH123
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "?")
    versions = ", ".join(f"{name} {version(name)}" for name in ("opentelemetry-sdk", "numpy", "pyarrow", "torch"))
    day = datetime.now(timezone.utc).date()
    return f"{day}, {os.cpu_count()} cores ({model}), Python {platform.python_version()}, {versions}"


def main() -> None:
    """Run what was asked for, by default everything, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="few rounds: a few minutes, and wide intervals")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; use {', '.join(BENCHMARKS)}")
    print(about())
    for name in options.names or BENCHMARKS:
        run, rounds, quick = BENCHMARKS[name]
        print(f"\n### {name}\n", flush=True)
        print(run(quick if options.quick else rounds), flush=True)


if __name__ == "__main__":
    main()
