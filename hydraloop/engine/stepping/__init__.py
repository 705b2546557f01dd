"""The optimizer step: several optimizers, and the steps of a task."""
