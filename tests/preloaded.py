"""What the processes of `tests.ranks` are forked with, imported without the garbage collector, which slows it down."""

# ruff: noqa: E402, F401
import gc

gc.disable()

import pytest
import torch._dynamo  # DDP imports it, for a second, in each new process
import torch.distributed.fsdp
import torchmetrics

import hydraloop.engine.distributed.process_group
import hydraloop.launch.build

gc.freeze()
gc.enable()
