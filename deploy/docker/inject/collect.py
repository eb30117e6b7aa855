"""Copy the part of the package that runs in training processes: what can be imported with nothing but Python.

    python deploy/docker/inject/collect.py TARGET

Run it with a Python that has no packages: a module that needs one is not copied.
"""

import shutil
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("model", "record", "instrument", "export", "settings", "configure")
"""Where what runs in a training process lives, beside the modules at the top."""
COMMAND = "__main__"
ENTRY = "otel_dltrace.autostart"
"""What the .pth file loads: without it nothing is traced."""


def modules() -> list[Path]:
    """Return the files, relative to the checkout."""
    package = ROOT / "otel_dltrace"
    found = [*package.glob("*.py"), *(path for room in ROOMS for path in (package / room).rglob("*.py"))]
    relative = sorted(path.relative_to(ROOT) for path in found if path.stem != COMMAND)
    return [path for path in relative if _is_self_contained(path)]


def _is_self_contained(path: Path) -> bool:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def main() -> None:
    """Fill the folder that the first argument names."""
    target = Path(sys.argv[1])
    sys.path.insert(0, str(ROOT))
    import_module(ENTRY)
    for path in [*modules(), Path("otel_dltrace.pth")]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target / path)
    shutil.copyfile(Path(__file__).with_name("sitecustomize.py"), target / "sitecustomize.py")


if __name__ == "__main__":
    main()
