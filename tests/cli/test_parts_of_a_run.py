"""A run of hosts without a folder in common: each has its own part on its own disk."""

import shutil
from pathlib import Path

import pytest

from otel_dltrace.cli.main import main
from tests.support.byteps_files import unpack
from tests.support.horovod_files import unpack as unpack_horovod


@pytest.fixture
def whole(tmp_path) -> Path:
    """A run of two hosts, one rank on each, in one directory."""
    run = tmp_path / "whole"
    assert main(["import", "byteps", str(unpack("byteps_w2_s1", tmp_path / "files")), "-o", str(run)]) == 0
    return run


@pytest.fixture
def parts(whole, tmp_path) -> list[str]:
    """The same run, a directory for each host."""
    hosts = sorted(folder.name for folder in (whole / "hosts").iterdir())
    for host in hosts:
        shutil.copytree(whole, tmp_path / host, ignore=shutil.ignore_patterns(*set(hosts) - {host}))
    return [str(tmp_path / host) for host in hosts]


@pytest.mark.parametrize("more", [[], ["--by", "key"], ["--rank", "1"], ["--steps", "0"]], ids=" ".join)
def test_parts_of_one_run_are_reported_as_the_whole(whole, parts, more, capsys):
    """What is asked for need not be in each of them."""
    capsys.readouterr()
    codes = [main(["report", str(whole), *more])]
    told = capsys.readouterr()
    codes.append(main(["report", *parts, *more]))

    assert (codes[0], told) == (codes[1], capsys.readouterr())
    assert told.out


def test_parts_of_one_run_are_compared_as_the_whole(whole, parts, tmp_path, monkeypatch, capsys):
    """They are one row, called after all of them; alone they are compared with nothing."""
    monkeypatch.chdir(tmp_path)
    assert main(["import", "horovod", str(unpack_horovod("horovod_mpi_np2", tmp_path)), "-o", "other"]) == 0
    first, second = (Path(part).name for part in parts)
    capsys.readouterr()
    assert main(["compare", "whole", "other", "--json"]) == 0
    told = capsys.readouterr().out
    assert main(["compare", first, "other", second, "--json"]) == 0

    assert capsys.readouterr().out == told.replace('"whole"', f'"{first}, {second}"')
    assert main(["compare", first, second]) == 2


def test_a_run_and_a_copy_of_a_part_of_it_have_a_report_each(whole, parts, capsys):
    """Together they would count the same spans twice."""
    capsys.readouterr()
    assert main(["report", str(whole), parts[0], "--json"]) == 0
    assert capsys.readouterr().out.count('"schema"') == 2


def test_what_is_in_no_part_is_told(parts, capsys):
    """As of one run."""
    assert main(["report", *parts, "--rank", "7"]) == 2
    assert "rank 7 is not in this run" in capsys.readouterr().err
