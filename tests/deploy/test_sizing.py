"""docs/sizing.md: its table is worked out from its figures."""

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
import yaml

from benchmarks._ranks import SPANS
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


@pytest.fixture
def sizing() -> ModuleType:
    """Load docs/sizing.py, which is no package."""
    spec = importlib.util.spec_from_file_location("sizing", ROOT / "docs" / "sizing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_follows_from_the_figures(sizing):
    """Who measures anew changes one number, and runs the script."""
    assert sizing.with_table(PAGE) == PAGE


def test_the_steps_are_those_that_are_measured(sizing):
    """A rank of the load records what the page reckons with."""
    assert sizing.figures(PAGE)["spans of a step that a rank records"] == SPANS


def test_the_series_of_a_rank_are_those_of_the_gateways_histogram(sizing):
    """A bucket for each bound and one above them; sum, count and calls."""
    gateway = yaml.safe_load((ROOT / "collector-config" / "gateway.yaml").read_text())
    bounds = gateway["connectors"]["span_metrics"]["histogram"]["explicit"]["buckets"]
    names = int(re.search(r"\| (\d+) names of spans", PAGE)[1])

    assert sizing.figures(PAGE)["series of a rank"] == names * (len(bounds) + 1 + 3)


def test_a_jobs_rate_is_its_spans_by_its_steps(sizing):
    """64 ranks fit into one trace, of which four go out in full."""
    found = sizing.sizes(sizing.Job(64, 0.1), sizing.figures(PAGE))

    usual, full = 64 * 8 + 1, 64 * 8 + 1 + 4 * (120 - 8)
    assert found["traces a step"] == "1"
    assert found["spans a step: usually, in full"] == f"{usual}, {full}"
    assert found["**spans/s, all hosts**"] == f"**{(usual + (full - usual) / 50) * 10:,.0f}**"


def test_it_is_worked_out_for_any_job(sizing):
    """As the page's first line says."""
    command = [sys.executable, ROOT / "docs" / "sizing.py", "--ranks", "4096", "--step", "0.8"]

    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == sizing.table([sizing.Job(4096, 0.8)], sizing.figures(PAGE)) + "\n"


@pytest.mark.parametrize("wrong", ["--ranks=0", "--ranks=-5", "--ranks=8.5", "--step=0", "--step=-1", "--step=nan"])
def test_a_job_without_ranks_or_time_is_none(wrong):
    """It is said, with exit code 2; `--ranks 0` would write the page anew."""
    command = [sys.executable, ROOT / "docs" / "sizing.py", "--ranks=8", wrong]

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    option, _, value = wrong.partition("=")
    kind = "a whole number" if option == "--ranks" else "a number"
    said = f"sizing.py: error: argument {option}: '{value}' is not {kind} above 0"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (2, "", said)
