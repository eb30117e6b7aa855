"""The run directory (contract 7): what is written there while a run lasts, and all that reads it afterwards."""
