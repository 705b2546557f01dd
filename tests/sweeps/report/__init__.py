"""Tests of hydraloop.sweeps.results."""
