"""Data sets and a model for examples and first steps: they need no download, and train in seconds to minutes."""

from __future__ import annotations

from hydraloop.examples.augmented import Augmented
from hydraloop.examples.diabetes import Diabetes
from hydraloop.examples.digits import Digits
from hydraloop.examples.gpt import GPT
from hydraloop.examples.python_sources import PythonSources

__all__ = ["GPT", "Augmented", "Diabetes", "Digits", "PythonSources"]
