"""Safety: which classes a config may name, and masked secrets. Imports no torch."""
