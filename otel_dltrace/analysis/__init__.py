"""Answers: pure functions from span batches to frozen results; numpy alone, and nothing is printed here."""
