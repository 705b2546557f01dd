"""The run directory: its files, its lock, and how the run was started. Imports no torch."""
