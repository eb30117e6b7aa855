"""From rings to rows: which are ours to read, what is new in them, and where reading goes on after a kill."""
