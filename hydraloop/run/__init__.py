"""The run directory on disk: atomic files, the lock, and whether a process is alive. Imports no torch."""
