"""Print what makes your shell complete commands, options and run directories.

    otel-dltrace completion bash > ~/.local/share/bash-completion/completions/otel-dltrace
    otel-dltrace completion zsh > "${fpath[1]}/_otel-dltrace"
    otel-dltrace completion fish > ~/.config/fish/completions/otel-dltrace.fish
    otel-dltrace completion tcsh >> ~/.cshrc

Shells that you start after that have it. If a folder does not exist yet, make it first (mkdir -p).
"""

import argparse
from importlib.resources import files

SHELLS = ("bash", "zsh", "fish", "tcsh")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads it")


def run(args: argparse.Namespace) -> int:
    """Print the shell's completion; `make docs` writes them all from the commands' arguments."""
    print((files("otel_dltrace.cli") / "completions" / args.shell).read_text(), end="")
    return 0
