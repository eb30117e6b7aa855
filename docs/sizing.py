"""Work out what a job needs, from the figures in docs/sizing.md.

``python docs/sizing.py`` writes that page's second table; ``python docs/sizing.py --ranks 4096 --step 0.8``
prints it for a job of yours.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from otel_dltrace.model.plan import share_of

PAGE = Path(__file__).with_name("sizing.md")
BUDGET = 10_000
RANKS_A_HOST = 8
EVERY = 50
"""Of so many steps one goes out in full, the default of OTEL_DLTRACE_STEPS."""
WAIT_S = 20
"""The gateways' DECISION_WAIT."""
CORE = 0.5
"""The part of its core that a collector is to use on average; the rest is for the steps in full."""
DAY_S = 86_400


@dataclass(frozen=True)
class Job:
    """How many ranks, and how long a step takes."""

    ranks: int
    step_s: float


def figures(page: str) -> dict[str, float]:
    """Return the first table of *page*: what is said to be how much."""
    rows = re.findall(r"^\| ([^|]+?) \| ([\d.,]+) \|", page, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in rows}


def sizes(job: Job, f: dict[str, float]) -> dict[str, str]:
    """Return what *job* needs where a span costs *f*."""
    shares = [share_of(rank, job.ranks, 0, BUDGET, 0) for rank in range(job.ranks)]
    traces = shares[-1].shard + 1
    in_full = sum(share.full for share in shares)
    always, recorded = f["spans of a step that every rank sends"], f["spans of a step that a rank records"]
    usual = job.ranks * always + traces
    full = usual + in_full * min(shares[0].limit, recorded - always)
    mean = usual + (full - usual) / EVERY
    rate = mean / job.step_s
    host = rate * RANKS_A_HOST / job.ranks
    routers, gateways = (
        max(2, math.ceil(rate * f[f"CPU us a span, {name}"] / 1e6 / CORE)) for name in ("router", "gateway")
    )
    waiting = rate * WAIT_S * f["bytes of a span that waits in a gateway"] / gateways
    kept = rate * f["share of the traces that is kept, %"] / 100
    written = recorded * RANKS_A_HOST / job.step_s
    return {
        "traces a step": f"{traces}",
        "spans a step: usually, in full": f"{usual:,.0f}, {full:,.0f}",
        "**spans/s, all hosts**": f"**{rate:,.0f}**",
        "spans/s while every step goes out in full": f"{full / job.step_s:,.0f}",
        "spans/s of a host": f"{host:,.0f}",
        "share of a core on each host: drain, sidecar": (
            f"{_percent(written * f['CPU us a span, drain'])}, {_percent(host * f['CPU us a span, sidecar'])}"
        ),
        "kB/s that a host sends (gzip)": f"{host * f['bytes a span, OTLP with gzip'] / 1e3:,.1f}",
        "MB/s into the routers: gzipped, unpacked": (
            f"{rate * f['bytes a span, OTLP with gzip'] / 1e6:,.1f}, {rate * f['bytes a span, OTLP'] / 1e6:,.1f}"
        ),
        "routers, each with one core": f"{routers}",
        "gateways, each with one core": f"{gateways}",
        "MB of spans that wait in a gateway": f"{waiting / 1e6:,.0f}",
        "spans/s kept": f"{kept:,.0f}",
        "GB a day in Tempo, ClickHouse": f"{kept * f['bytes a span, stored'] * DAY_S / 1e9:,.1f}",
        "GB a day in each host's run directory": f"{written * f['bytes a span, run directory'] * DAY_S / 1e9:,.1f}",
        "series in Prometheus, with and without `dl.rank`": (
            f"{gateways * job.ranks * f['series of a rank']:,.0f}, {gateways * f['series of a rank']:,.0f}"
        ),
    }


def _percent(us_a_second: float) -> str:
    return f"{us_a_second / 1e4:.2f} %"


def table(jobs: Sequence[Job], f: dict[str, float]) -> str:
    """Return the sizes of *jobs* side by side, in markdown."""
    columns = [sizes(job, f) for job in jobs]
    head = ["", *(f"{job.ranks:,} ranks, {job.step_s:g} s a step" for job in jobs)]
    rows = [head, ["---"] * len(head), *([name, *(column[name] for column in columns)] for name in columns[0])]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def with_table(page: str) -> str:
    """Return *page* with its second table worked out anew."""
    head, begin, rest = page.partition("<!-- worked out by docs/sizing.py -->\n")
    _, end, tail = rest.partition("<!-- to here -->")
    return f"{head}{begin}{table((Job(1_000, 0.5), Job(10_000, 0.5)), figures(head))}\n{end}{tail}"


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads an argument of *kind*: a job has ranks, and its steps take time."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole' if kind is int else 'a'} number above 0")
        return value

    return read


def main() -> None:
    """Write the page's table, or print one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=above_zero(int), help="print the sizes of a job of this many ranks")
    parser.add_argument(
        "--step", type=above_zero(float), default=0.5, metavar="S", help="seconds that a step takes (0.5)"
    )
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if options.ranks:
        print(table([Job(options.ranks, options.step)], figures(page)))
    else:
        PAGE.write_text(with_table(page), encoding="utf-8")


if __name__ == "__main__":
    main()
