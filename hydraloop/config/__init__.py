"""The command line before and around Hydra: arguments, composing, checks, help and the dry run. Imports no torch."""
