"""Metrics of the drain: what it samples, what its ranks' steps say, and the ways out of it."""
