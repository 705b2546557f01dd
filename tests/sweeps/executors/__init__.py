"""Tests of hydraloop.sweeps.executors."""
