"""Between the command line and Hydra: arguments, composing, checks, help, the dry run. Nothing here imports torch."""
