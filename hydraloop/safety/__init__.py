"""Safety: what a config may name, and secrets. Imports no torch."""
