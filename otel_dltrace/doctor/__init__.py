"""What is wired on this machine, what is not, and why; each check gives findings."""
