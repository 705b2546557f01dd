"""What a person reads before, during and after training."""
