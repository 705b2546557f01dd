"""A data set from a csv file: scikit-learn contains small ones."""

import csv
from importlib.resources import files

import torch
from torch.utils.data import WeightedRandomSampler

from hydraloop.data import InMemoryDataset


class Table(InMemoryDataset):
    """Rows of a csv file. The last column is the class, the others are measurements.

    Args:
        name: a file in scikit-learn, `breast_cancer.csv` or `wine_data.csv`.
        part: of every ten rows, `train` has the first seven, `val` the next one and `test` the last two.
    """

    def __init__(self, name: str, part: str) -> None:
        with (files("sklearn") / "datasets" / "data" / name).open(encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        measured = torch.tensor([[float(value) for value in row[:-1]] for row in rows])
        classes = torch.tensor([int(row[-1]) for row in rows])
        place = torch.arange(len(rows)) % 10
        parts = {"train": place < 7, "val": place == 7, "test": place > 7}
        train = measured[parts["train"]]
        chosen = parts[part]
        super().__init__((measured[chosen] - train.mean(0)) / train.std(0), classes[chosen], classes=header[2:])


def balanced(table: Table) -> WeightedRandomSampler:
    """Return a sampler of as many rows as the table has, with the same probability for each class."""
    weights = 1 / table.targets.bincount()[table.targets]
    return WeightedRandomSampler(weights.tolist(), len(table))
