"""The line at the end of a run says what became of every span."""

import json

import pytest

from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model.summary import summary_line
from tests.support.processes import Place, waiting

MANY = """
    import otel_dltrace as d
    d.start()
    for i in range(200):
        with d.step(i):
            for _ in range(40):
                with d.phase("rollout"):
                    pass
"""


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        pytest.param({"spans": 4068}, "4,068 spans recorded, none lost", id="embedded default"),
        pytest.param(
            {"spans": 10, "otlp": {"accepted": 12, "waiting": 0, "spilled": 0}},
            "10 spans recorded, 12 sent, none waiting, none lost",
            id="all delivered",
        ),
        pytest.param(
            {"spans": 10, "not_in_otlp": 7, "otlp": {"accepted": 4}},
            "10 spans recorded, 4 sent, none waiting, "
            "7 not to be sent (outside OTEL_DLTRACE_STEPS or the span budget), none lost",
            id="not all in the window",
        ),
        pytest.param(
            {"spans": 10, "otlp": {"accepted": 10, "warning": "it says yes in text/html"}},
            "10 spans recorded, 10 sent (it says yes in text/html), none waiting, none lost",
            id="sent to whoever says yes",
        ),
        pytest.param(
            {"spans": 10, "otlp": {"accepted": 30, "shared": True}},
            "10 spans recorded, 30 sent (with those of other runs of the same drain), none waiting, none lost",
            id="runs at once",
        ),
        pytest.param(
            {"spans": 10, "otlp": {"accepted": 30, "warning": "2 are too old", "shared": True}},
            "10 spans recorded, 30 sent (2 are too old; with those of other runs of the same drain), "
            "none waiting, none lost",
            id="runs at once, and a warning",
        ),
        pytest.param(
            {"spans": 10, "truncated": 2, "otlp": {"accepted": 3, "spilled": 9, "trouble": "connection refused"}},
            "10 spans recorded, 2 of them cut off, 3 sent, 9 waiting (connection refused), none lost",
            id="killed, and the collector away",
        ),
        pytest.param(
            {
                "spans": 5,
                "lapped_phase": 7,
                "unrecorded": 3,
                "dropped_by_quota": 2,
                "otlp": {"accepted": 1, "rejected": 3, "rejection": "too old", "dropped": {"spill folder full": 4}},
            },
            "5 spans recorded, 1 sent, none waiting, 3 kept here and not sent (rejected: too old), "
            "4 kept here and not sent (spill folder full), 7 records lost (ring full at level phase), "
            "3 records lost (no room in the ring), 2 lost (quota)",
            id="everything that can be lost",
        ),
        pytest.param(
            {
                "spans": 5,
                "otlp": {
                    "accepted": 0,
                    "dropped": {"refused by the collector": 6},
                    "trouble": "HTTP 401: no",
                    "diagnosis": "it wants a token: set one",
                },
            },
            "5 spans recorded, 0 sent, none waiting, 6 kept here and not sent (it wants a token: set one), none lost",
            id="refused, and why",
        ),
        pytest.param(
            {
                "spans": 10,
                "exporters": {
                    "console": {"accepted": 8, "waiting": 4, "dropped": {}},
                    "mine": {"accepted": 0, "waiting": 0, "dropped": {"raised KeyError": 9, "was too slow": 3}},
                },
            },
            "10 spans recorded, 8 to console, 4 waiting for console, 0 to mine, 9 lost (mine raised KeyError), "
            "3 lost (mine was too slow)",
            id="exporters of others",
        ),
    ],
)
def test_the_summary_names_what_was_lost_and_why(figures, line):
    """Recorded, sent, waiting, lost and why."""
    assert summary_line(figures) == line


def test_one_record_is_one():
    """Of a ring that was full for long the record of the step may be the one of its level."""
    assert summary_line({"spans": 5, "lapped_step": 1}).endswith(", 1 record lost (ring full at level step)")


def test_before_the_end_nobody_says_that_none_is_lost():
    """What is lost already is."""
    assert summary_line({"spans": 5}, is_over=False) == "5 spans recorded"
    lost = summary_line({"spans": 5, "unrecorded": 2}, is_over=False)
    assert lost == "5 spans recorded, 2 records lost (no room in the ring)"


@pytest.mark.parametrize(("quota", "lost"), [("20K", "8,000 lost (quota)"), ("5G", "none lost")])
def test_the_line_tells_what_the_quota_takes(place: Place, quota: str, lost: str) -> None:
    """It is taken before the line is written, and not once more when the drain ends."""
    on = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_QUOTA": quota, "OTEL_DLTRACE_METRICS": "0"}
    said = place.run(waiting(MANY), **on).stderr
    (run,) = place.runs()
    place.wait_for_drains()

    (path,) = run.glob("hosts/*/drain.json")
    figures = json.loads(path.read_text())["summary"]
    assert said.startswith(f"otel_dltrace: {summary_line(figures)}; in {run.name}; "), said
    assert summary_line(figures) == f"8,200 spans recorded, {lost}"
    assert sum(map(len, read_run(run))) == 8200 - figures.get("dropped_by_quota", 0)
