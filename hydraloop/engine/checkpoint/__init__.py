"""Checkpoints: their format, and how a run is saved to one and restored from it."""
