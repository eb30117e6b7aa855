"""Horovod's helpers: its calls, its operations, and the store that its ranks share."""
