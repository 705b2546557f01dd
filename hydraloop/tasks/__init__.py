"""Tasks: a model with its loss and its metrics, as the engine trains and evaluates it."""

from __future__ import annotations

from hydraloop.tasks.classification import Classification
from hydraloop.tasks.huggingface import HuggingFace
from hydraloop.tasks.language_modeling import LanguageModeling
from hydraloop.tasks.metrics import (
    Accuracy,
    BitsPerByte,
    MeanAbsoluteError,
    Metric,
    SumMetric,
    TokenAccuracy,
)
from hydraloop.tasks.multilabel import MultiLabel
from hydraloop.tasks.regression import Regression
from hydraloop.tasks.segmentation import Segmentation
from hydraloop.tasks.task import Task

__all__ = [
    "Accuracy",
    "BitsPerByte",
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
