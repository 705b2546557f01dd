"""Tests of hydraloop.sweeps.search."""
