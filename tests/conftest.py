"""What all tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.steps import Steps
from tests.support import build_horovod, chromium
from tests.support.certificates import Certificates, make_certificates
from tests.support.paths import DATA
from tests.support.processes import Place, a_place

# How long an example takes says more of the machine than of the code; what examples share they begin anew.
_CALM = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=_CALM)
hypothesis.settings.load_profile("suite")

# The files that take minutes, the longest first: one that is begun last has all processors but one wait for it.
_LONG = [
    f"test_{name}.py"
    for name in (
        "readme horovod_live bad_days kubernetes_pods pushpull_traced opentelemetry_switch torch_distributed "
        "pushpull_torch metrics_otlp byteps_adapter pushpull_jobs pushpull_failing mpi4py torch_groups interrupts "
        "timings_frameworks end_to_end"
    ).split()
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites golden files."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files in tests/data")


@pytest.fixture
def assert_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name, or rewrite the file under ``--update-golden``."""

    def check(name: str, text: str) -> None:
        path = DATA / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture(scope="session")
def horovod_site() -> Path:
    """The folder that real Horovod is in, built once for this torch; skips where it cannot be built."""
    try:
        return build_horovod.horovod()
    except build_horovod.CannotBuildError as error:
        pytest.skip(f"Horovod cannot be built: {error}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Give a working folder with rings of its own."""
    with a_place(tmp_path) as it:
        yield it


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    """Give the steps of a recorder of its own."""
    recorder = Recorder(tmp_path, 1 << 20)
    yield Steps(recorder)
    recorder.close()


@pytest.fixture(scope="module")
def viewers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Viewers]:
    """Run a real Chromium, in which traces are opened."""
    if reason := chromium.missing():
        pytest.skip(reason)
    with chromium.viewers(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Give a server's certificate, and an authority nobody knows."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))
