"""Small models for the built-in data sets. Any other `nn.Module` works too."""

from __future__ import annotations

from hydraloop.models.mlp import MLP
from hydraloop.models.small_cnn import SmallCNN

__all__ = ["MLP", "SmallCNN"]
