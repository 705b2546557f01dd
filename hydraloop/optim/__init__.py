"""What torch.optim leaves open: what a schedule changes, when, and for how long; a start without torch._dynamo."""

from __future__ import annotations

from hydraloop.optim.building import build_schedule
from hydraloop.optim.optimizers import resolve_fused
from hydraloop.optim.schedule import Schedule
from hydraloop.optim.schedulers import YOLOXLR, WarmupCosineLR
from hydraloop.optim.startup import avoid_dynamo_import

__all__ = ["YOLOXLR", "Schedule", "WarmupCosineLR", "avoid_dynamo_import", "build_schedule", "resolve_fused"]
