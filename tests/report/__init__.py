"""Tests of `hydraloop report`."""
