"""Tests of hydraloop.sweeps."""
