"""The parameter server's helpers: what a worker and a server write."""
