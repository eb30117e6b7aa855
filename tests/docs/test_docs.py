"""What is generated is as it was generated last."""

import runpy

from tests.support.paths import ROOT


def test_make_docs_was_run_after_the_last_change():
    """Who edits a generated page by hand loses it, and who changes a table of the code has to generate."""
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()

    assert generated == {path: path.read_text() for path in generated}
