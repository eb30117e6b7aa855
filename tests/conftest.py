"""What all tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import build_horovod

DATA = Path(__file__).parent / "data"


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
