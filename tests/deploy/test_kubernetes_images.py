"""The images: tracing injected through PYTHONPATH, with nothing but Python; and a Dockerfile that fits the checkout."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from otel_dltrace._version import __version__
from otel_dltrace.record.ring_file import SPAN
from tests.support.paths import ROOT
from tests.support.processes import but_for_rings
from tests.support.torch_harness import read_ring

DOCKER = ROOT / "deploy" / "docker"
COLLECT = DOCKER / "inject" / "collect.py"
TRAIN = """
    import sys
    import otel_dltrace

    for _ in range(3):
        with otel_dltrace.step():
            with otel_dltrace.phase("rollout"):
                pass
    print(otel_dltrace.__file__)
"""
CHAINED = """
    import sys
    sys.stderr.write(f"chained as {__name__}, known: {sys.modules[__name__].__file__ == __file__}\\n")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without a single package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory, bare: Path) -> Path:
    """What the Dockerfile's stage `collect` makes."""
    folder = tmp_path_factory.mktemp("autoinstrumentation")
    subprocess.run([bare, COLLECT, folder], check=True)
    return folder


def test_a_folder_on_the_python_path_traces_a_program_without_any_package(place, bare, injected):
    """The ring holds its steps; no numpy is there; the next sitecustomize on the way has run, under its name."""
    other = place.folder / "other"
    other.mkdir()
    place.write(CHAINED, "other/sitecustomize.py")
    # The operator names a folder first that its own image has.
    path = f"{injected}/opentelemetry/instrumentation/auto_instrumentation:{injected}:{other}"
    env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_DRAIN": "off", "PYTHONPATH": path}
    done = place.finish(place.popen([str(bare), str(place.write(TRAIN))], **env))

    assert (done.returncode, but_for_rings(done.stderr)) == (0, "chained as sitecustomize, known: True\n")
    assert done.stdout == f"{injected / 'otel_dltrace' / '__init__.py'}\n"
    (ring,) = place.rings.glob("*.ring")
    recorded = read_ring(ring)
    assert Counter(span.name for span in recorded.records if span.kind == SPAN) == {"rank.step": 3, "rollout": 3}


@pytest.mark.parametrize("chained", [True, False], ids=["beside another", "alone"])
def test_unless_it_is_switched_on_the_folder_only_lets_the_next_one_run(place, bare, injected, chained):
    """Nothing of ours is imported; a sitecustomize that we hide runs all the same."""
    other = place.folder / "other"
    other.mkdir()
    if chained:
        place.write(CHAINED, "other/sitecustomize.py")
    command = [str(bare), "-c", "import sys; print(sorted(name for name in sys.modules if 'dltrace' in name))"]
    done = place.finish(place.popen(command, PYTHONPATH=f"{injected}:{other}"))

    said = "chained as sitecustomize, known: True\n" if chained else ""
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", said)


def test_the_sdks_own_injector_and_ours_both_run(place, injected):
    """Under opentelemetry-instrument, whose sitecustomize comes first on the way and second here."""
    injectors = pytest.importorskip("opentelemetry.instrumentation.auto_instrumentation")
    theirs = Path(injectors.__file__).parent
    program = "import sys; print('otel_dltrace.instrument' in sys.modules, sys.modules['sitecustomize'].__file__)"
    env = {"OTEL_DLTRACE": "1", "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    env |= {"OTEL_LOGS_EXPORTER": "none", "PYTHONPATH": f"{injected}:{theirs}"}
    done = place.finish(place.popen([sys.executable, "-c", program], **env))

    assert done.stdout == f"True {theirs / 'sitecustomize.py'}\n", done.stderr


def test_a_drain_of_another_user_may_read_the_rings_of_a_trainer(injected):
    """In a setgid folder of the pod's group, as a kubelet makes it, rings are for the group; and for nobody else."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _runs(path)), None)
    if python is None:
        pytest.skip("no Python here that any user may run")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tempfile.TemporaryDirectory() as copy:
        os.chown(folder, 0, 64200)
        Path(folder).chmod(0o2777)
        shutil.copytree(injected, copy, dirs_exist_ok=True)
        Path(copy).chmod(0o755)
        env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_DRAIN": "off", "OTEL_DLTRACE_RING_DIR": folder, "PYTHONPATH": copy}
        program = "import otel_dltrace\nwith otel_dltrace.step(): pass"
        for user in (0, 1000):
            command = [python, "-c", program]
            subprocess.run(command, env=env, cwd="/tmp", user=user, group=user, extra_groups=[64200], check=True)
        rings = list(Path(folder).glob("*.ring"))
        assert len(rings) == 2
        for ring in rings:
            head = ["head", "-c", "8", ring]
            read = subprocess.run(
                head, user=64201, group=64201, extra_groups=[64200], stdout=subprocess.PIPE, check=True
            )
            assert read.stdout == b"DLTRING1"
            other = subprocess.run(head, user=64201, group=64201, extra_groups=[], capture_output=True, check=False)
            assert (other.returncode, other.stdout) == (1, b"")


def _runs(python: str) -> bool:
    """Return whether a user without rights may run *python*, and it is new enough."""
    command = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
    try:
        return subprocess.run(command, user=64201, group=64201, extra_groups=[], cwd="/", check=False).returncode == 0
    except OSError:
        return False


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and what follows them."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def test_what_the_dockerfile_copies_is_in_the_checkout_and_goes_to_the_builder():
    """Sources exist and pass the .dockerignore; stages are named before they are copied from."""
    sent = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    stages: list[str] = []
    for word, rest in instructions():
        if word == "FROM":
            image, stage = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            assert re.search(r":\d", image)
            stages.append(stage)
        elif word == "COPY":
            *sources, _ = rest.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages[:-1]
            else:
                assert set(sources) <= sent
                assert all((ROOT / source).exists() for source in sources)
    assert {"drain", "inject", "example"} <= set(stages)


def test_the_images_run_as_nobody_in_particular_and_start_a_command_that_the_package_has():
    """A number for the user, as runAsNonRoot asks for; the entry point is a script of the project."""
    stages: dict[str, dict[str, str]] = {}
    for word, rest in instructions():
        if word == "FROM":
            stages[rest.rpartition(" ")[2]] = stage = {}
        stage[word] = rest
    assert {stages[name].get("USER") for name in ("drain", "inject", "example")} == {"64201:64201"}
    scripts = entry_points(group="console_scripts")
    assert stages["drain"]["ENTRYPOINT"] in {
        f'["{script.name}"]' for script in scripts if "otel_dltrace" in script.value
    }


def test_the_commands_that_build_the_images_name_targets_and_this_version():
    """Those at the top of the Dockerfile and in the docs make the tags that the manifests ask for."""
    texts = (DOCKER / "Dockerfile").read_text() + (ROOT / "docs" / "kubernetes.md").read_text()
    built = set(re.findall(r"--target (\w+) +-t (?:REGISTRY/)?otel-dltrace/(\w+):(\S+)", texts))
    assert built == {(name, name, __version__) for name in ("drain", "inject", "example")}
    assert {rest.rpartition(" ")[2] for word, rest in instructions() if word == "FROM"} >= {
        name for name, _, _ in built
    }
