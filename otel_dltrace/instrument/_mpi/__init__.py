"""MPI's helpers: the families of its calls, buffers, groups, requests."""
