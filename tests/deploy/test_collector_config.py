"""The packaged configurations: the Collector accepts each, they are whole, documented, and printed as they are."""

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.request import urlopen

import pytest

from otel_dltrace.cli.collector import COLLECTORS, OPTIONAL
from otel_dltrace.cli.main import main
from tests.support.paths import ROOT
from tests.support.servers import configured, program, running

CONFIGS = ROOT / "collector-config"
OVER = [
    pytest.param("gateway-router", ["gateways-by-dns"], id="gateways-by-dns"),
    pytest.param("gateway", ["gateway-on-disk"], id="gateway-on-disk"),
    pytest.param("gateway", ["k8s-attributes"], id="k8s-attributes"),
    pytest.param("gateway", ["kafka"], id="kafka"),
    pytest.param("gateway", ["clickhouse"], id="clickhouse"),
    pytest.param("gateway", ["gateway-on-disk", "k8s-attributes", "kafka"], id="several"),
]


def validate(tmp_path: Path, *paths: Path) -> "subprocess.CompletedProcess[str]":
    """Ask the Collector, from a folder where nothing is and with no variable set."""
    command = [str(program("otelcol")), "validate"]
    command += [word for path in paths for word in ("--config", str(path))]
    env = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COLLECTORS)
def test_the_collector_accepts_what_is_printed(tmp_path, capsys, name):
    """Each is whole: no other file, no variable, no folder is needed."""
    assert main(["collector", "--print", name]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    result = validate(tmp_path, tmp_path / "printed.yaml")

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "printed.yaml").read_text() == (CONFIGS / f"{name}.yaml").read_text()


@pytest.mark.parametrize(("name", "overlays"), OVER)
def test_what_is_laid_over_is_accepted_too(tmp_path, name, overlays):
    """With the file it is for, alone and together."""
    result = validate(tmp_path, CONFIGS / f"{name}.yaml", *(CONFIGS / "optional" / f"{o}.yaml" for o in overlays))
    if 'unknown type: "clickhouse"' in result.stderr:
        pytest.skip("this collector has no ClickHouse exporter; otelcol-contrib has one")

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("name", COLLECTORS)
def test_it_starts_and_says_nothing_against_it(tmp_path, name):
    """No old name, no unset variable: some mistakes show only then. The health check says ready."""
    collector = configured(name, tmp_path)
    with running(collector), urlopen(f"http://{collector.env['HEALTH_ENDPOINT']}", timeout=10) as answer:
        assert answer.status == 200
    said = [line for line in collector.log.read_text().splitlines() if re.search(r"\t(warn|error)\t", line)]

    # In a container it asks for the host's disks; and nobody is there to send to.
    expected = ("No `root_path` config set", "addrConn.createTransport failed to connect")
    assert [line for line in said if not any(text in line for text in expected)] == []


def test_the_view_by_rank_stands_beside_the_collector_that_sends_to_it():
    """As their commands are written, on one host: it listens at no port of another one's."""
    port = re.compile(r"(?:OTLP_\w+|HEALTH)_ENDPOINT:-[\d.]+:(\d+)\}")
    ports = {name: set(port.findall((CONFIGS / f"{name}.yaml").read_text())) for name in COLLECTORS}

    assert ports.pop("jaeger-by-rank") == {"15317", "15133"}
    assert set().union(*ports.values()) == {"4317", "4318", "13133"}


def test_every_file_can_be_printed():
    """None is forgotten, none is gone."""
    assert sorted(COLLECTORS) == sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "kustomization")
    assert sorted(OPTIONAL) == sorted(path.stem for path in (CONFIGS / "optional").glob("*.yaml"))


def test_a_name_that_is_none_is_one_sentence(capsys):
    """It says which there are."""
    with pytest.raises(SystemExit) as error:
        main(["collector", "--print", "gatway"])

    assert error.value.code == 2
    assert "--print 'gatway' is not one of sidecar, " in capsys.readouterr().err


def test_shared_parts_are_those_of_the_fragments():
    """`make docs` was run after a fragment was changed; each fragment is in at least two files."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    texts = [(CONFIGS / f"{name}.yaml").read_text() for name in COLLECTORS]

    assert [generate.with_fragments(text) for text in texts] == texts
    uses = {
        path.name: sum(f"fragments/{path.name}\n" in text for text in texts) for path in CONFIGS.glob("fragments/*")
    }
    assert {name: number for name, number in uses.items() if number < 2} == {}


def test_every_variable_is_documented():
    """With its default, and none that is gone."""
    page = (ROOT / "docs" / "collector.md").read_text()
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    documented = {name for names, _, _ in rows for name in re.findall(r"`(\w+)`", names)}
    used = {}
    for path in (*CONFIGS.glob("*.yaml"), *CONFIGS.glob("optional/*.yaml")):
        for name, default in re.findall(r"\$\{env:(\w+):-(.*?)\}", path.read_text()):
            used.setdefault(name, set()).add(default)

    assert documented == set(used)
    told = {name: row[1] + row[2] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    untold = {
        (name, default)
        for name, defaults in used.items()
        for default in defaults
        if Path(default).name not in told[name]
    }
    assert untold == set()


def test_no_variable_is_without_a_default():
    """An unset one would be an empty text, which the Collector often takes without a word."""
    text = "".join(path.read_text() for path in CONFIGS.rglob("*.yaml"))

    assert re.findall(r"\$\{(?!env:\w+:-).*?\}", text) == []


def test_a_wheel_has_them(tmp_path):
    """What is installed from a package index prints them as well."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "otel_dltrace", "collector", "--print"]
    for name in (*COLLECTORS, *OPTIONAL):
        done = subprocess.run([*command, name], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        folder = CONFIGS / "optional" if name in OPTIONAL else CONFIGS
        assert done.stdout == (folder / f"{name}.yaml").read_text()
