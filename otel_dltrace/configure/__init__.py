"""What wires the rooms: the live side of a process, and the drain."""
