"""What torch.optim leaves open: when a schedule steps, how long it is, and a start without torch._dynamo."""

from __future__ import annotations

from hydraloop.optim.optimizers import resolve_fused
from hydraloop.optim.schedule import Schedule, build_schedule
from hydraloop.optim.startup import avoid_dynamo_import

__all__ = ["Schedule", "avoid_dynamo_import", "build_schedule", "resolve_fused"]
