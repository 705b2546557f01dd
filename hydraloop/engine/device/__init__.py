"""The device: how it is chosen, precision, moving batches, preparing the model, seeding."""
