"""Switches tracing on where PYTHONPATH names this folder, and runs the ``sitecustomize`` that stood there before.

Python reads ``.pth`` files in site-packages, and not in the folders of PYTHONPATH; what it looks for
everywhere is one module of this name, the first on the way.
"""

# ruff: noqa: PTH100, PTH120 -- every Python in the pod runs this, and pathlib would cost it a millisecond

import os
import site
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next() -> None:
    """Run the ``sitecustomize`` that Python would have found without us, under its name."""
    others = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if sys.version_info >= (3, 10):  # noqa: UP036 -- the image we are put into may have an older one
    site.addsitedir(_HERE)  # reads otel_dltrace.pth beside us, which decides
elif os.environ.get("OTEL_DLTRACE", "0") not in ("", "0"):
    sys.stderr.write(f"otel_dltrace: needs Python 3.10 or later, this is {sys.version.split()[0]}; tracing is off\n")
_run_the_next()
