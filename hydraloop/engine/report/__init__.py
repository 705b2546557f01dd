"""What a person reads before and after training."""
