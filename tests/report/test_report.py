"""The report: what people and programs read of a result, compared as a whole."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from otel_dltrace.analysis.blame.judgement import Straggler
from otel_dltrace.analysis.blame.stragglers import Stragglers
from otel_dltrace.analysis.compose import RunReport, analyse
from otel_dltrace.analysis.select import select
from otel_dltrace.analysis.steps.drift import Drift, DriftedRank
from otel_dltrace.analysis.utilisation import UtilisationRow
from otel_dltrace.cli.main import main
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import COLLECTIVE, STAGES
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.json import to_json
from otel_dltrace.report.machine import MOST_ROWS, figure, utilisation_parts
from otel_dltrace.report.text import write
from otel_dltrace.report.words import drift, ms, plain, rate, size, verdict
from tests.support.run_files import a_run
from tests.support.run_files import write as save
from tests.support.runs import MS, Rank, ddp, rendered


def mixed() -> RunReport:
    """Return the report of a run with a straggler, bound and done ends, and losses."""
    batches = ddp(2, steps=6, slow={(1, "forward"): 20.0}, first=30.0)
    batches += [Rank(r, 2).collective(5, 2000 + r, 2004, 900, name="barrier", size=0).batch() for r in range(2)]
    return analyse(batches, [{"summary": {"lapped_phase": 1234}}])


def test_a_report_reads_like_this(assert_golden):
    """The whole text of one report: the verdict first, what it rests on last."""
    assert_golden("report.txt", rendered(mixed(), width=100))


def test_a_report_without_anything_is_short():
    """No step, no table."""
    assert rendered(analyse([])) == (
        "Cannot tell who makes the others wait: no rank has done a step.\n"
        "\nRests on: ranks none of 0; no steps; 0 spans, 0 of them left open; none lost; one monotonic clock.\n"
        "All times are host times.\n"
    )


def finding(**fields) -> Straggler:
    """Return a straggler with some fields of its own."""
    usual = Straggler(1, "forward", 24_100_000, 4 * MS, 20_300_000, 96, 97, 99, 19 * MS)
    return replace(usual, **fields)


def test_how_late_a_rank_comes_is_told_as_well_as_the_clocks_know():
    """Where they know it to a tenth nothing is said of them."""
    late = Straggler(1, "forward", 22 * MS, 4 * MS, 12 * MS, 98, 98, 99, 62 * MS)
    told = [verdict(Stragglers("straggler", "", (late,), 100, MS, 0.5, (), 0, unsure * MS))[1] for unsure in (6, 51)]

    begins = "The begins of the collectives confirm it: it comes to the collectives 62.0 ms after the others"
    clocks = ", give or take 51.0 ms of the hosts' clocks"
    assert told == [f"{begins}{within} (in 98 of 99 steps)." for within in ("", clocks)]


@pytest.mark.parametrize(
    ("found", "sentences"),
    [
        pytest.param(
            (finding(),),
            [
                "Rank 1 makes the others wait: its forward takes 24.1 ms, 20.3 ms longer than the others' "
                "(in 96 of 100 steps).",
                "The begins of the collectives confirm it: it comes to the collectives 19.0 ms after the others "
                "(in 97 of 99 steps).",
            ],
            id="confirmed",
        ),
        pytest.param(
            (finding(stage="between steps", arrivals=0),),
            [
                "Rank 1 makes the others wait: the time between its steps is 24.1 ms, 20.3 ms longer than the others' "
                "(in 96 of 100 steps).",
                "Nothing confirms it: no collective shows who came late.",
            ],
            id="unconfirmed",
        ),
        pytest.param(
            (finding(late=20, arrivals=99),),
            [
                "Rank 1 makes the others wait: its forward takes 24.1 ms, 20.3 ms longer than the others' "
                "(in 96 of 100 steps).",
                "Nothing confirms it: it comes late to the collectives in 20 of 99 steps, and its other communication "
                "does not tell.",
            ],
            id="seldom late",
        ),
        pytest.param(
            (finding(stage=""),),
            [
                "Rank 1 makes the others wait: it comes to the collectives 19.0 ms after the others "
                "(in 97 of 99 steps), though no stage of its own stands out."
            ],
            id="by arrivals alone",
        ),
        pytest.param(
            (finding(), finding(rank=3, stage="residual")),
            [
                "Rank 1 makes the others wait: its forward takes 24.1 ms, 20.3 ms longer than the others' "
                "(in 96 of 100 steps).",
                "The begins of the collectives confirm it: it comes to the collectives 19.0 ms after the others "
                "(in 97 of 99 steps).",
                "So does rank 3: the part of its step outside any stage takes 24.1 ms, 20.3 ms longer than the others' "
                "(in 96 of 100 steps).",
            ],
            id="two",
        ),
    ],
)
def test_a_straggler_is_told_in_words(found, sentences):
    """Who, in which stage, by how much, how often, and what confirms it."""
    assert verdict(Stragglers("straggler", "", found, 100, MS, 0.5, (), 0)) == sentences


def test_no_straggler_is_told_with_the_threshold():
    """What "none" means is part of the sentence."""
    assert verdict(Stragglers("none", "", (), 40, 1_500_000, 0.5, (), 0)) == [
        "No rank makes the others wait in most steps: "
        "none exceeds them by 1.50 ms in any stage in more than 50% of 40 steps."
    ]


def test_drift_is_told_in_words():
    """Which rank, since when, against whom."""
    assert drift(Drift(9, 1, (DriftedRank(0, 4, 26, 21, 1), DriftedRank(2, 1, 7, 5, None)))) == [
        "Rank 0 numbers its steps differently: before step 4 its last collective was number 26, rank 1's number 21; "
        "its numbers are 1 apart from there on.",
        "Rank 2 numbers its steps differently: before step 1 its last collective was number 7, rank 1's number 5.",
        "Have the program mark its steps with `otel_dltrace.step()`, at the same place on all ranks.",
    ]
    assert drift(Drift(9, 1, ())) == []


def test_tables_say_from_which_step_on_they_are():
    """A part of a run begins where it does, not at step 0; ranges of bytes that read alike are one figure."""
    batches = select(ddp(2, steps=20), Window.parse("7-15"))
    batches[0].rows["size"][np.flatnonzero(batches[0].is_kind(COLLECTIVE))[0]] += 1
    text = rendered(analyse(batches))
    titles = [line.split(":")[0] for line in text.splitlines() if " from " in line and " on" in line]
    assert titles[-3:] == [
        "Steps from 7 on, ms",
        "Steps from 7 on",
        "Timings from step 7 on, of the steps that had them",
    ]
    assert ("18.0 KiB" in text, "..18.0 KiB" in text) == (True, False)


def test_a_thousand_ranks_fit_the_screen():
    """Sixteen rows, the accused among them, and a word on the rest."""
    text = rendered(analyse(ddp(40, steps=7, slow={(33, "forward"): 20.0})))
    table = text.split("Steps from 1 on, ms")[1].split("Steps from")[0]
    rows = [line.split()[0] for line in table.splitlines()[3:] if line.strip()]
    assert rows[:16] == [*map(str, range(15)), "33"]
    assert "24 more ranks: choose with --rank, or --json has all" in text


def test_the_first_of_many_stragglers_have_a_sentence_each():
    """A rack that is slow is no screen of sentences before the first table."""
    report = analyse(ddp(40, steps=7, slow={(r, "forward"): 20.0 + r for r in range(20)}))
    told = verdict(report.stragglers)
    assert [re.findall(r"^(?:So does )?rank (\d+)", line, re.IGNORECASE) for line in told if "forward" in line] == [
        [str(rank)] for rank in range(19, 11, -1)
    ]
    assert told[-1] == "So do ranks 0-11: --json has their figures."


def test_waits_below_the_uncertainty_are_not_printed():
    """Across hosts the table says what the clocks can carry instead of a figure."""
    batches = [
        Rank(r, 2, f"node-{r}", anchor=Anchor(0, 0, 5 * MS)).collective(0, 10 + r, 20, 1).batch() for r in range(2)
    ]
    text = rendered(analyse(batches))
    assert "< +-10.0" in text
    assert "wall clocks of several hosts (2, read to +-10,000.0 us)" in " ".join(text.split())


def test_names_cannot_write_to_the_terminal():
    """Markup, escapes and newlines in a tensor's name are shown, not obeyed."""
    batch = Rank().collective(0, 0, 1, 1, name="[red]\x1b[31m\nx").batch()
    out = io.StringIO()
    write(analyse([batch]), Console(file=out, width=150, force_terminal=True, color_system="truecolor"))
    assert "\n[red]?[31m?x  gloo 0" in out.getvalue()
    assert plain("a\x07\u202e") == "a??"


def test_a_very_long_name_is_shown_without_its_middle():
    """A tensor may be called by a page of text; JSON has all of it."""
    name = "a" * 2048 + "b" * 2048
    found = analyse([Rank().collective(0, 0, 1, 1, name="all_reduce", tensor=name).batch()])
    assert "".join(rendered(found).split()).count("a" * 60 + "..." + "b" * 80) == 1
    assert len(rendered(found)) < 4096 < len(to_json(found))


def test_a_rank_that_came_later_has_no_first_steps():
    """Nor times of 0 there, which would be the shortest."""
    early, late = ddp(2, steps=12)
    (table,) = re.findall(
        r"The first steps apart(.+?)\n\n", rendered(analyse([early, late.take(late["step"] >= 5)])), re.DOTALL
    )
    assert re.findall(r"^\d", table, re.MULTILINE) == ["0"]


def test_a_table_of_many_stages_keeps_its_columns():
    """Squeezed to the usual width it would lose the ranks, and what lies between steps."""
    rank = Rank(7, 8)
    for start in range(0, 400, 100):
        rank.step(start // 100, start, start + 90)
        for number, name in enumerate(STAGES):
            rank.stage(start // 100, name, start + 2 * number, start + 2 * number + 1)
    text = rendered(analyse([rank.batch()]), width=120)
    table = text.split("mean ms of each stage per step\n")[1].split("\n\n")[0].splitlines()
    assert table[-1].split() == ["7", *["1.00"] * len(STAGES), "79.0", "10.0"]
    assert max(len(line) for line in text.splitlines() if "Rests on" in line) <= 120


@pytest.mark.parametrize("name", ["[/]", "[red]x"])
def test_a_stage_is_called_in_a_table_as_it_is(name):
    """Above its column too, where a closing tag of nothing ended the report."""
    text = rendered(analyse([Rank().step(0, 0, 9).stage(0, name, 0, 9).batch()]))
    assert f"rank {name} " in " ".join(text.split())


def test_runs_are_called_as_their_folders(tmp_path, capsys):
    """Sweeps put brackets into names."""
    runs = [tmp_path / name for name in ("sweep[lr=0.1]", "[b]")]
    for run in runs:
        a_run(run, compacted=False)
    assert main(["report", *map(str, runs)]) == 0
    said = capsys.readouterr().out
    assert [run.name for run in runs if f"{run.name} ──" in said] == [run.name for run in runs]


def test_the_generations_of_a_job_are_told_apart(tmp_path, capsys):
    """Their folders have one name, with other digits behind it; the first is as most runs are."""
    for number in (1, 2):
        (batch,) = ddp(1, steps=2)
        bind = replace(batch.process.bind, generation=f"{number}.00")
        batch = replace(batch, process=replace(batch.process, bind=bind))
        save(tmp_path / f"run-{number}", "a", batch, compacted=False)
    assert main(["report", str(tmp_path / "run-2"), str(tmp_path / "run-1")]) == 0
    titles = re.findall(r"^─+ .*(run-.*?) ─+$", capsys.readouterr().out, re.MULTILINE)

    assert titles == ["run-2, generation 2", "run-1"]
    assert main(["compare", str(tmp_path / "run-2"), str(tmp_path / "run-1"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["name"].rpartition("/")[2], run["generation"]) for run in compared] == [("run-2", 2), ("run-1", 1)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.0166666, "0.0167"),
        (0.5, "0.500"),
        (0.9999, "1.00"),
        (1.0, "1.00"),
        (99.99, "99.99"),
        (1234.56, "1,234.6"),
    ],
)
def test_rates_have_three_digits_or_more(value, text):
    """A step of a minute is not done 0.02 times a second, a fifth more often than it is."""
    assert rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (9_999_999, "10.00"), (10 * MS, "10.0"), (1_234_567_890, "1,234.6")],
)
def test_times_have_three_digits_or_so(value, text):
    """Milliseconds, with two decimals below ten."""
    assert ms(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (1 << 70, "1024.0 EiB")]
)
def test_sizes_are_short(value, text):
    """Binary units, since buffers are powers of two."""
    assert size(value) == text


def test_json_holds_every_field():
    """Programs read the same result, in ns, with null where nothing can be told."""
    report = mixed()
    read = json.loads(to_json(report))
    assert read["schema"] == 1
    assert set(read) == {"schema", *RunReport.__dataclass_fields__}
    assert read["stragglers"]["found"][0]["stage"] == "forward"
    assert read["breakdown"]["steady"][0]["step"]["p50"] == report.breakdown.steady[0].step.p50
    assert read["guards"]["steps"] == [0, 5]
    assert json.loads(to_json(analyse([])))["guards"]["steps"] is None


def test_steps_without_stages_have_their_rates():
    """A loop of a framework that nobody traces, whose program marks its steps and says their samples."""
    rank = Rank(0, 1)
    for n in range(10):
        rank.step(n, 100 * n, 100 * n + 80, a=32)
    assert re.search(r"^ *0 +9 +80\.0 .* 10\.00 +320\.0\b", rendered(analyse([rank.batch()])), re.MULTILINE)


def test_each_world_of_a_job_has_a_report(tmp_path, capsys):
    """Its ranks are its own, and so are its steps."""
    run = tmp_path / "RUN"
    worker, other = Rank(0, 1, nonce=1), Rank(0, 1, nonce=2, world="rollout")
    for rank in (worker, other):
        rank.step(0, 0, 10)
    for host, rank in zip("ab", (worker, other), strict=True):
        save(run, host, rank.batch(), compacted=False)

    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert [" ".join(line.split("─")).split() for line in text.splitlines() if "world" in line] == [
        ["world", "default"],
        ["world", "rollout"],
    ]


@pytest.mark.parametrize("by", [[], ["--by", "key"], ["--by", "negotiation"]], ids=" ".join)
def test_each_document_says_whose_it_is(tmp_path, capsys, monkeypatch, by):
    """Of several runs and worlds a program knows which is which, as a reader does by the lines above them."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run-1"
    for host, rank in zip("ab", (Rank(0, 1, nonce=1), Rank(0, 1, nonce=2, world="rollout")), strict=True):
        save(run, host, rank.step(0, 0, 10).batch(), compacted=False)
    (batch,) = ddp(1, steps=2)
    bind = replace(batch.process.bind, generation="2.00")
    save(tmp_path / "run-2", "a", replace(batch, process=replace(batch.process, bind=bind)), compacted=False)

    assert main(["report", str(run), str(tmp_path / "run-2"), *by, "--json"]) == 0
    documents = json.loads("[" + capsys.readouterr().out.replace("\n}\n{", "\n},{") + "]")
    assert [[one[key] for key in ("name", "generation", "world")] for one in documents] == [
        ["run-1", 1, "default"],
        ["run-1", 1, "rollout"],
        ["run-2", 2, "default"],
    ]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        pytest.param(size((1 << 20) - 1), "1.0 MiB", id="size"),
        pytest.param(size((1 << 20) - 60), "1023.9 KiB", id="size, smaller"),
        pytest.param(rate(99.999), "100.0", id="rate"),
        pytest.param(figure(99.99, "W"), "100 W", id="figure"),
    ],
)
def test_a_number_that_is_rounded_up_has_the_digits_of_what_it_becomes(said, text):
    """No 1024.0 KiB, and no 100.00 beside 100.0."""
    assert said == text


USED, STILL = (UtilisationRow("node-0", -1, "CPU busy", "", "1", 3, high, high, high) for high in (0.5, 0.0))


@pytest.mark.parametrize(
    ("rows", "last"),
    [
        pytest.param([USED] * 2, "", id="none is left out"),
        pytest.param([USED, STILL], "1 stayed at 0: --json has all", id="at 0"),
        pytest.param([USED] * (MOST_ROWS + 2), "2 more: --json has all", id="more"),
        pytest.param([USED] * (MOST_ROWS + 2) + [STILL], "2 more, 1 stayed at 0: --json has all", id="both"),
        pytest.param([STILL] * 3, "Nothing that was sampled was used: 3 stayed at 0; --json has all", id="nothing"),
    ],
)
def test_what_the_table_of_the_machines_leaves_out_is_counted(rows, last):
    """What stayed at 0 apart; no table without a row."""
    *_, part = utilisation_parts(rows)

    assert (part.plain.strip() if isinstance(part, Text) else "") == last


def test_how_often_the_clocks_are_proved_wrong_is_told_beside_the_waits():
    """A rank was done in each of nine steps before the last one came: 5 ms by the hosts' clocks."""
    ranks = [Rank(r, 2, f"node-{r}", anchor=Anchor(0, 6 * MS * r, 1000)) for r in range(2)]
    for n in range(10):
        for rank in ranks:
            rank.step(n, 60 * n, 60 * n + 40, seq=n + 1).collective(n, 60 * n + 5, 60 * n + 6, n + 1)
    text = " ".join(rendered(analyse([rank.batch() for rank in ranks])).split())

    assert "10 times a rank was done before the last one came, by up to 5.00 ms" in text
