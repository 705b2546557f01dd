"""Tasks: a model with its loss and its metrics, as the engine trains and evaluates it."""

from __future__ import annotations

from hydraloop.tasks.language_modeling import HuggingFace, LanguageModeling
from hydraloop.tasks.metrics import (
    Accuracy,
    BitsPerToken,
    MeanAbsoluteError,
    Metric,
    SumMetric,
    TokenAccuracy,
)
from hydraloop.tasks.per_sample import Classification, MultiLabel, Regression
from hydraloop.tasks.segmentation import Segmentation
from hydraloop.tasks.task import Task

__all__ = [
    "Accuracy",
    "BitsPerToken",
    "Classification",
    "HuggingFace",
    "LanguageModeling",
    "MeanAbsoluteError",
    "Metric",
    "MultiLabel",
    "Regression",
    "Segmentation",
    "SumMetric",
    "Task",
    "TokenAccuracy",
]
