"""Optimizers: several as one, and the names of their parameters."""
