"""Tests of hydraloop.sweeps.report."""
