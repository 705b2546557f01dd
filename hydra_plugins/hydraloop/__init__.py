"""Hydra plugins of hydraloop. Hydra imports them at every start, also for --help."""
