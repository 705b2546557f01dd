"""Sweeps whose processes are killed at random moments."""
