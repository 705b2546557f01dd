"""Optimizers, and schedules as functions of the step."""

from __future__ import annotations

from hydraloop.optim.avoid_dynamo import avoid_dynamo_import
from hydraloop.optim.optimizers import resolve_fused
from hydraloop.optim.schedule import Schedule
from hydraloop.optim.schedule_functions import (
    YOLOX,
    Constant,
    Cosine,
    Exponential,
    Function,
    Linear,
    MultiStep,
    Plateau,
    Poly,
    WarmupCosine,
)
from hydraloop.optim.schedules_from_config import Length, build_schedule, build_schedules
from hydraloop.optim.torch_schedule import TorchSchedule

__all__ = [
    "YOLOX",
    "Constant",
    "Cosine",
    "Exponential",
    "Function",
    "Length",
    "Linear",
    "MultiStep",
    "Plateau",
    "Poly",
    "Schedule",
    "TorchSchedule",
    "WarmupCosine",
    "avoid_dynamo_import",
    "build_schedule",
    "build_schedules",
    "resolve_fused",
]
