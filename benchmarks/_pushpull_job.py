"""The job of `bench_pushpull`: what ``otel-dltrace pushpull launch`` starts, with servers that can be switched.

It starts itself for each process: without a role in its environment it launches, else it serves or trains.
"""

import os
import signal
import sys
from collections.abc import Sequence

import otel_dltrace
from otel_dltrace.instrument import registry
from otel_dltrace.pushpull import launch as launching
from otel_dltrace.pushpull.options import read_env
from otel_dltrace.record.tracer import live

ON, OFF = signal.SIGUSR1, signal.SIGUSR2


def launch(arguments: Sequence[str]) -> int:
    """Launch the job that the first three *arguments* describe; the others are for its ranks."""
    workers, local_ranks, servers = map(int, arguments[:3])
    launching.SERVE = (sys.executable, "-m", "benchmarks._pushpull_job")
    program = (sys.executable, "-m", "benchmarks._pushpull_rank", *arguments[3:])
    return launching.launch(launching.Plan(program, workers, local_ranks, servers), os.environ)


def serve() -> None:
    """Serve; traced from the signal `ON` to the signal `OFF`."""
    otel_dltrace.start()
    tracer, live.tracer = live.tracer, None

    def switch(number: int, _frame: object) -> None:
        live.tracer = tracer if number == ON else None
        (registry.instrument if number == ON else registry.uninstrument)(["pushpull"])

    for number in (ON, OFF):
        signal.signal(number, switch)
    from otel_dltrace.pushpull.serving import serve

    serve(*read_env(os.environ))
    live.tracer = tracer  # for its end


if __name__ == "__main__":
    if os.environ.get("DMLC_ROLE") == "server":
        serve()
    else:
        sys.exit(launch(sys.argv[1:]))
