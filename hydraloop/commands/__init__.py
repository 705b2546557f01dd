"""The commands of `python -m hydraloop` for runs and sweeps, one file each. `parser` lists them."""
