"""The same collective on all its ranks: who came when, on one clock, and who waited for whom."""
