"""Starts the processes of a run with torch's elastic launcher, or joins those that torchrun has started.

The config is composed and checked once. Every rank gets the `RunPlan`, and does not read the command line. Importing
this package does not import torch.
"""
