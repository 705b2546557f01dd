"""The built-in data sets: their data, their splits, and their imports."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from examples.diabetes.diabetes import Diabetes
from hydraloop.data import Digits
from hydraloop.data.in_memory import SPLITS, stratified_split
from hydraloop.errors import UserError


@pytest.mark.slow
def test_digits_are_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    expected = sklearn.load_digits()
    pixels = torch.cat([Digits(split).inputs * Digits(split).std + Digits(split).mean for split in SPLITS])
    labels = torch.cat([Digits(split).targets for split in SPLITS])
    order = torch.cat([stratified_split(torch.tensor(expected.target), split) for split in SPLITS])
    assert torch.equal(labels, torch.tensor(expected.target)[order])
    assert torch.allclose(pixels.flatten(1), torch.tensor(expected.data, dtype=torch.float32)[order], atol=1e-4)


def test_shapes_and_types() -> None:
    digits, diabetes = Digits("train"), Diabetes("val")
    assert (digits.inputs.shape, digits.inputs.dtype) == ((1259, 1, 8, 8), torch.float32)
    assert (digits.targets.shape, digits.targets.dtype) == ((1259,), torch.int64)
    assert digits.classes == tuple("0123456789")
    assert (diabetes.inputs.shape, diabetes.inputs.dtype) == ((40, 10), torch.float32)
    assert (diabetes.targets.shape, diabetes.targets.dtype) == ((40, 1), torch.float32)
    assert diabetes.classes is None


def test_all_parts_are_standardised_by_the_train_part() -> None:
    digits, diabetes = Digits("train").inputs, Diabetes("train").inputs
    assert digits.mean().item() == pytest.approx(0, abs=1e-5)
    assert digits.std().item() == pytest.approx(1, abs=1e-5)
    assert torch.allclose(diabetes.mean(0), torch.zeros(10), atol=1e-5)
    assert torch.allclose(diabetes.std(0), torch.ones(10), atol=1e-5)
    assert Digits("val").mean == Digits("train").mean
    assert Digits("val").inputs.mean().abs().item() > 1e-5


@pytest.mark.parametrize("seed", [0, 1, 17])
def test_parts_are_disjoint_complete_and_stratified(seed: int) -> None:
    labels = torch.arange(1797) % 10
    parts = {split: stratified_split(labels, split, seed=seed) for split in SPLITS}
    together = torch.cat(list(parts.values()))
    assert torch.equal(together.sort().values, torch.arange(1797))
    for split, share in (("train", 0.7), ("val", 0.1), ("test", 0.2)):
        counts = labels[parts[split]].bincount().tolist()
        assert all(abs(count - share * 179.7) <= 1.5 for count in counts), (split, counts)


def test_the_split_depends_only_on_its_seed() -> None:
    labels = torch.arange(100) % 4
    torch.manual_seed(1)
    first = stratified_split(labels, "test", seed=3)
    torch.manual_seed(2)
    assert torch.equal(stratified_split(labels, "test", seed=3), first)
    assert not torch.equal(stratified_split(labels, "test", seed=4), first)
    assert not torch.equal(Digits("val", split_seed=1).targets, Digits("val").targets)


def test_files_in_another_folder(tmp_path: Path) -> None:
    rows = [",".join(["1"] * 32 + ["3"] * 32 + [str(label)]) for label in range(10) for _ in range(10)]
    (tmp_path / "digits.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    digits = Digits("test", root=str(tmp_path))
    assert len(digits) == 20
    assert digits.mean == pytest.approx(2)


@pytest.mark.parametrize("dataset", [Digits, Diabetes])
def test_a_missing_file_names_option_and_path(dataset: type, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        dataset("train", root=str(tmp_path / "nowhere"))
    assert caught.value.key == "root"
    assert str(tmp_path / "nowhere") in caught.value.problem


def test_an_unknown_split_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="train, val, test") as caught:
        Digits("valid")
    assert caught.value.key == "split"
