"""Starts the processes of a run with torch's elastic launcher, or joins those that torchrun has started.

The config is composed and checked once. Every rank gets a `Job` with the finished config and the run directory, and
does not read the command line. Importing this package does not import torch.
"""
