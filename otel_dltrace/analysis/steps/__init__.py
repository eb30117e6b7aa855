"""What one step of one rank is made of: its stages, what it waited, what it did itself."""
