"""PyTorch's helpers: hooks, groups and their numbers, calls that are under way, how to bind a process."""
