"""Data sets that fit in memory, their order, and loaders that can resume inside an epoch."""

from __future__ import annotations

from hydraloop.data.augmented import Augmented
from hydraloop.data.collate import Tokenize
from hydraloop.data.diabetes import Diabetes
from hydraloop.data.digits import Digits
from hydraloop.data.loader import Loader, build_loader
from hydraloop.data.python_sources import PythonSources
from hydraloop.data.sampler import EpochSampler
from hydraloop.data.tensors import InMemoryDataset

__all__ = [
    "Augmented",
    "Diabetes",
    "Digits",
    "EpochSampler",
    "InMemoryDataset",
    "Loader",
    "PythonSources",
    "Tokenize",
    "build_loader",
]
