"""From a checked config to a running engine: the plan, this process or ranks, the engine; and the Python interface.

Importing this package does not import torch.
"""
