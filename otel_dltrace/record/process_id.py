"""What tells this process from any other: the nonce of its ring, the boot, the pid namespace."""

import os
import time
from pathlib import Path

_nonces: dict[int, bytes] = {}
_used: set[bytes] = set()


def process_nonce() -> bytes:
    """Return the nonce of this process's ring, of the one to come while there is none; a forked child has another."""
    return _nonces.setdefault(os.getpid(), os.urandom(8))


def take_nonce() -> bytes:
    """Return the nonce for a ring that is being made: another one where this process has had a ring."""
    if process_nonce() in _used:
        del _nonces[os.getpid()]
    _used.add(process_nonce())
    return process_nonce()


def process_began() -> float:
    """Return when this process began (Unix seconds); now, where nobody says."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.time() - age


def boot_id() -> bytes:
    """Return the id of this boot of the kernel: monotonic clocks are comparable within it alone."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return bytes(16)
    return bytes.fromhex(text.strip().replace("-", ""))


def pid_namespace() -> int:
    """Return the inode of our pid namespace: pids of another mean nothing here; 0 where nobody says."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
