"""The run directory on disk: its files, its lock, and what a run was started with. Imports no torch."""
