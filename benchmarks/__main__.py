"""Run benchmarks and print their tables in markdown: ``python -m benchmarks [NAME ...] [--quick]``."""

import argparse
import os
import platform
import signal
import sys
from datetime import datetime, timezone
from importlib.metadata import version

from benchmarks import (
    bench_chrome,
    bench_collector,
    bench_horovod,
    bench_import,
    bench_memory,
    bench_metrics,
    bench_mpi,
    bench_pushpull,
    bench_record,
    bench_start,
    bench_training,
    bench_wire,
)

BENCHMARKS = {
    "record": (bench_record.run, 200, 20),
    "wire": (bench_wire.run, 60, 10),
    "chrome": (bench_chrome.run, 40, 8),
    "import": (bench_import.run, 20, 5),
    "training": (bench_training.run, 100, 6),
    "pushpull": (bench_pushpull.run, 40, 4),
    "mpi": (bench_mpi.run, 60, 8),
    "horovod": (bench_horovod.run, 60, 4),
    "collector": (bench_collector.run, 15, 3),
    "memory": (bench_memory.run, 5, 1),
    "metrics": (bench_metrics.run, 40, 5),
    "start": (bench_start.run, 30, 4),
}
"""What runs, and its rounds in full and with ``--quick``."""


def about() -> str:
    """Return what was measured on what."""
    with open("/proc/cpuinfo") as file:  # noqa: PTH123
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "?")
    versions = ", ".join(f"{name} {version(name)}" for name in ("opentelemetry-sdk", "numpy", "pyarrow", "torch"))
    day = datetime.now(timezone.utc).date()
    return f"{day}, {os.cpu_count()} cores ({model}), Python {platform.python_version()}, {versions}"


def about_one(name: str) -> str:
    """Return the help's line on the benchmark *name*: the first of its module."""
    run, rounds, quick = BENCHMARKS[name]
    line = (sys.modules[run.__module__].__doc__ or "").partition("\n")[0].partition(": ``")[0]
    return f"  {name:10} {line} ({rounds} rounds, {quick} with --quick)"


def at_least_one(text: str) -> int:
    """Return *text* as a number of rounds."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} rounds measure nothing; use at least 1")
    return number


def main() -> None:
    """Run what was asked for, by default everything, one after the other."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run benchmarks and print their tables in markdown; docs/benchmarks.md says what each means.",
        epilog="\n".join(["benchmarks:", *map(about_one, BENCHMARKS)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which, in this order; default: all")
    parser.add_argument("--quick", action="store_true", help="few rounds: some minutes, and wide intervals")
    parser.add_argument("--rounds", type=at_least_one, metavar="N", help="this many rounds instead")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; use {', '.join(BENCHMARKS)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was started is ended
    print(about())
    for name in options.names or BENCHMARKS:
        run, rounds, quick = BENCHMARKS[name]
        print(f"\n### {name}\n", flush=True)
        print(run(options.rounds or (quick if options.quick else rounds)), flush=True)


if __name__ == "__main__":
    main()
