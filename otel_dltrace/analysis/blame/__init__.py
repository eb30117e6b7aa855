"""Who makes the others wait, in which stage, and what speaks for and against it."""
