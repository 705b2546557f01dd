"""Forward, backward and the optimizer step, also with several optimizers and the steps of a task."""
