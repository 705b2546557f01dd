"""The device: precision, batch transfer, model preparation, seeding."""
