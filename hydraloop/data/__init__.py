"""Data sets that fit in memory, their order, and loaders that can resume inside an epoch."""

from __future__ import annotations

from hydraloop.data.augmented import Augmented
from hydraloop.data.collate import Tokenize
from hydraloop.data.diabetes import Diabetes
from hydraloop.data.digits import Digits
from hydraloop.data.in_memory import InMemoryDataset
from hydraloop.data.map_style_loader import GlobalBatchLoader, build_loader
from hydraloop.data.python_sources import PythonSources
from hydraloop.data.sampler import EpochSampler

Loader = GlobalBatchLoader  # its name in earlier versions, without a place in `__all__`

__all__ = [
    "Augmented",
    "Diabetes",
    "Digits",
    "EpochSampler",
    "GlobalBatchLoader",
    "InMemoryDataset",
    "PythonSources",
    "Tokenize",
    "build_loader",
]
