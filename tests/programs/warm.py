"""A Python that has run its argument, such as the import of torch, and from which processes are forked that go on.

Each line that it reads asks for some; it answers with their exit codes once all have ended. When one fails it ends the
others, as torchrun does.
"""

import atexit
import gc
import json
import os
import signal
import sys
from pathlib import Path


def reap(children: list[int]) -> list[int]:
    """Wait until all *children* have ended; return their exit codes."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGTERM)
    return [codes[child] for child in children]


def become(asked: dict, number: int) -> None:
    """Make this process what a new one would be: its environment, its arguments, where it reads and writes."""
    os.environ.clear()
    os.environ.update(asked["environments"][number])
    for descriptor, path in enumerate((os.devnull, asked["out"], asked["err"])):
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    atexit.register(thaw)
    sys.argv = [asked["program"]]
    sys.path[0] = str(Path(asked["program"]).parent)


def thaw() -> None:
    """Have what was imported before the fork be collected where somebody complains if it is not: triton's bindings."""
    if "triton" in sys.modules:
        gc.unfreeze()


def forked() -> str:
    """Return, in each process that is forked, the program that it runs; what forks them ends when nobody asks."""
    for line in sys.stdin:
        asked, children = json.loads(line), []
        for number in range(len(asked["environments"])):
            children.append(os.fork())
            if not children[-1]:
                become(asked, number)
                return asked["program"]
        print(json.dumps(reap(children)), flush=True)
    sys.exit()


exec(sys.argv[1])
gc.collect()
gc.freeze()  # each would go through all of it, and have pages of its own then, only to end
__file__ = forked()
exec(compile(Path(__file__).read_text(), __file__, "exec"))
