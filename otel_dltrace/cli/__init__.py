"""The commands: parse, call, exit code."""
