"""Text for the terminal before, during and after training."""
