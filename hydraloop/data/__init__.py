"""Data in memory, and loaders of sets with indices and of streams, which can resume inside an epoch."""

from __future__ import annotations

from hydraloop.data.in_memory import Digits, InMemoryDataset
from hydraloop.data.map_style_loader import GlobalBatchLoader, build_loader
from hydraloop.data.sampler import EpochSampler

__all__ = ["Digits", "EpochSampler", "GlobalBatchLoader", "InMemoryDataset", "build_loader"]
