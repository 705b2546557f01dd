"""Checkpoints: what is in one, how a run is saved and restored."""
