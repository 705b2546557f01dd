"""Diabetes: ten measurements of 442 patients and the progression of the disease after a year; a regression."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from hydraloop.data import InMemoryDataset
from hydraloop.data.in_memory import find_data_file, read_table, stratified_split
from hydraloop.errors import not_installed

_BINS = 10  # of the sorted targets, so that each part has mild and severe cases


class Diabetes(InMemoryDataset):
    """One part of the diabetes data: 312 (train), 40 (val) and 90 (test) patients.

    Inputs are float32 `[N, 10]`, each column standardised by the train part's mean and standard deviation. Targets are
    float32 `[N, 1]` and stay in their own unit (a score from 25 to 346, mean 152, standard deviation 77), so that
    losses and metrics have this unit too. The model scales its output (`MLP(output_mean=..., output_std=...)`).

    Source: B. Efron, T. Hastie, I. Johnstone and R. Tibshirani, Least Angle Regression, 2004.

    Args:
        split: `train`, `val` or `test`; the parts have the same share of each tenth of the targets.
        root: a folder with `diabetes_data_raw.csv.gz` and `diabetes_target.csv.gz`; None: the copy in
            scikit-learn.
        split_seed: of the split. It is not the run's seed, so that runs with different seeds are comparable.

    Raises:
        UserError: the split is unknown, the folder does not have the files, or scikit-learn is not installed.
    """

    def __init__(self, split: str, root: str | None = None, split_seed: int = 0) -> None:
        root = _folder_of_scikit_learn() if root is None else root
        inputs = read_table(find_data_file("diabetes_data_raw.csv.gz", root=root))
        targets = read_table(find_data_file("diabetes_target.csv.gz", root=root))
        ranks = targets.flatten().argsort(stable=True).argsort()
        bins = ranks * _BINS // len(ranks)
        train = inputs[stratified_split(bins, "train", seed=split_seed)]
        chosen = stratified_split(bins, split, seed=split_seed)
        standardised = (inputs[chosen] - train.mean(0)) / train.std(0)
        super().__init__(standardised.to(torch.float32), targets[chosen].to(torch.float32))


def _folder_of_scikit_learn() -> str:
    """Return the folder with its data files, without importing it, which takes 0.8 s."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise not_installed("scikit-learn", key="root", use="contains the data")
    return str(Path(spec.origin).parent / "datasets" / "data")
