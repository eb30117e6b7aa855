"""See where the time of a training step goes, on which rank, and who makes the others wait.

    otel-dltrace run -- torchrun --nproc-per-node 2 train.py     trace a program, then report on it
    otel-dltrace report dltrace-train-1a2b3c4d                   report again
    otel-dltrace export dltrace-train-1a2b3c4d --to chrome -o trace.json.gz

OTEL_DLTRACE=1 in a program's environment traces it as well; `otel-dltrace run --help` lists the variables.
"""

import argparse
import errno
import importlib
import keyword
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

from otel_dltrace._version import __version__
from otel_dltrace.cli.printing import print_no_more, tell
from otel_dltrace.model.errors import DltraceError

COMMANDS = (
    "run",
    "report",
    "compare",
    "export",
    "import",
    "recover",
    "open",
    "doctor",
    "collector",
    "pushpull",
    "drain",
    "completion",
)
"""Each is a module here with a docstring (its help), ``arguments(parser)`` and ``run(args) -> int``; that of a name
which Python keeps for itself has an underscore behind it."""
_REWORDED = (
    (r"argument (\S+): invalid int value: (.*)", r"\1 \2 is not a whole number; write 3, for example"),
    (r"argument (\S+): invalid choice: ('[^']*') \(choose from (.*)\)", r"\1 \2 is not one of \3"),
    (r"argument (\S+): (.*)", r"\1: \2"),
    (r"the following arguments are required: (.*)", r"\1 is missing"),
    (r"unrecognized arguments: (.*)", r"there is no argument \1"),
)
"""What argparse says of a wrong command line, and what we say."""
_NO_MEMORY = "there is not enough memory for this; give it less at once, or run it where there is more"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AS_WRITTEN = argparse.RawDescriptionHelpFormatter


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without a page of what would be right."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse as argparse does, but let no command hand on what it does not know: its own help says what there is."""
        found, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Say *message* in our words, and end."""
        wrong, begin, choices = message.partition("(choose from ")
        message = wrong + begin + choices.replace("'", "")  # which Python quotes depends on its version
        for pattern, ours in _REWORDED:
            if found := re.fullmatch(pattern, message):
                message = found.expand(ours)
                break
        tell(f"{message}; `{self.prog} --help` lists what there is")
        self.exit(2)


def make_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the commands *names*."""
    parser = Parser("otel-dltrace", description=__doc__, formatter_class=_AS_WRITTEN)
    parser.add_argument("--version", action="version", version=f"otel-dltrace {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in names:
        module = importlib.import_module(f"otel_dltrace.cli.{name}{'_' * keyword.iskeyword(name)}")
        text = module.__doc__ or ""
        sub = commands.add_parser(
            name,
            help=text.partition("\n")[0],  # there is no docstring under python -OO
            description=text,
            formatter_class=_AS_WRITTEN,
        )
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 2 for what a user can mend."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, TextIOWrapper):  # what its encoding has not is shown all the same, as in errors
        sys.stdout.reconfigure(errors="backslashreplace")
    # One command loads no other's libraries: the drain starts beside a training that waits for nobody.
    named = [name for name in argv[:1] if name in COMMANDS]
    try:
        args = make_parser(named or COMMANDS).parse_args(argv)  # here, since a Ctrl-C may well come while it loads them
        code = int(args.run(args))
        print(end="", flush=True)  # here, and not when Python ends, we can say that nobody reads
    except (DltraceError, MemoryError) as error:
        tell(str(error) if isinstance(error, DltraceError) else _NO_MEMORY)
        return 2
    except KeyboardInterrupt:
        return 130
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # rich makes the one of the other
        print_no_more()  # `| head` closed the pipe
        return 141
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        tell(_why(error))
        try:
            print(end="", flush=True)
        except OSError:
            print_no_more()
        return 2
    return code


def _why(error: OSError) -> str:
    """Return what the system did not let us do, whatever it was: a disk or a server may fail anywhere."""
    if isinstance(error, FileNotFoundError) and not _is_somewhere():
        return "the working directory has been removed: cd to one that exists"
    if error.errno in _FULL:
        return f"{error.filename or 'the output'}: {error.strerror}; make room for it"
    return f"{error.filename or 'a file or a connection'}: {error.strerror}"


def _is_somewhere() -> bool:
    """Return whether the working directory is there: what needs a path of it fails else, wherever it does."""
    try:
        os.getcwd()  # noqa: PTH109  -- `Path.cwd` says the same
    except FileNotFoundError:
        return False
    return True
