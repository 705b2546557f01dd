"""Small models for the built-in data sets; any `nn.Module` does as well."""

from __future__ import annotations

from hydraloop.models.gpt import GPT
from hydraloop.models.mlp import MLP
from hydraloop.models.small_cnn import SmallCNN

__all__ = ["GPT", "MLP", "SmallCNN"]
