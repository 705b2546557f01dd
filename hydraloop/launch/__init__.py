"""Starting the processes of a run: by ourselves with torch's elastic launcher, or as part of a torchrun.

A run is composed and checked once; its ranks get a `Job`, the finished config and the run directory, and never a
command line. Importing this package does not import torch.
"""
