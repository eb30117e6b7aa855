"""The keys of parameter servers as ps-lite numbers them: each server has its share of all keys of 64 bits."""

KEYS = (1 << 64) - 1


def first_key(server: int, servers: int) -> int:
    """Return what ps-lite adds to the keys of a server: its share of all keys begins there."""
    return server * (KEYS // servers)
