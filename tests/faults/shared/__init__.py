"""Sweeps that two machines run in one folder, which each of them sees through caches of its own."""
