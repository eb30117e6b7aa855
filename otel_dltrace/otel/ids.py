"""Ids for users' own spans that no seed repeats and that draw nothing from the user's random numbers."""

import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator


class OsIdGenerator(IdGenerator):
    """Takes ids from the operating system.

    The SDK's own draws them from the global `random`, which training seeds alike on every rank:
    the ranks' spans would share their ids, and every span would move the user's own numbers on.
    """

    def generate_span_id(self) -> int:
        """Return 64 random bits, not all of them 0."""
        return secrets.randbits(64) or self.generate_span_id()

    def generate_trace_id(self) -> int:
        """Return 128 random bits, not all of them 0."""
        return secrets.randbits(128) or self.generate_trace_id()

    def is_trace_id_random(self) -> bool:
        """Return that samplers may rely on it."""
        return True
