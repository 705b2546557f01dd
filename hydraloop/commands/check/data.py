"""Checks of the data sets: samples that are in two splits, and labels that the model has no output for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hydraloop.commands.check.findings import Finding
from hydraloop.commands.check.short_runs import digest
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.data.seeded_fetcher import BatchRequest, SeededFetcher
from hydraloop.engine.engine import Engine
from hydraloop.tasks.labels import ignored_label, labels_error

MOST = 20_000
"""Samples of a data set that are read."""
_SECONDS = 20.0
"""Time for reading one data set."""
_FEW = 0.01
"""Part of a split that may be in the training data, in addition to the part of the training data that has copies."""


@dataclass
class Read:
    """What is known of the samples of a data set."""

    samples: int
    """In the whole data set."""
    hashes: list[str] = field(default_factory=list)
    """Hashes of the samples that were read, without the label if a sample is `(inputs, label)`."""
    labels: set[int] = field(default_factory=set)
    """All integer labels that were read."""
    draws: bool = False
    """Whether samples differ between epochs, so that their hashes say nothing."""


def read(loader: GlobalBatchLoader) -> Read:
    """Read up to MOST samples, without the draws of augmentations if a data set wraps another one."""
    seeded, samples = loader.seeded, len(loader.dataset)
    indices = range(samples) if samples <= MOST else random.Random(0).sample(range(samples), MOST)
    inner = _without_draws(seeded, indices[:8])
    found = Read(samples, draws=inner is None)
    until = monotonic() + _SECONDS
    for index in indices:
        sample = _sample(inner or seeded, index, 0)
        is_pair = isinstance(sample, tuple | list) and len(sample) == 2
        found.hashes.append(digest(sample[0] if is_pair else sample))
        found.labels.update(_integers(sample[1] if is_pair else sample))
        if monotonic() > until:
            break
    return found


def _without_draws(seeded: SeededFetcher, indices: Sequence[int]) -> SeededFetcher | None:
    """Return the data set, or the one that it wraps, whose samples are the same in two epochs; None without one."""
    while any(digest(_sample(seeded, index, 0)) != digest(_sample(seeded, index, 1)) for index in indices):
        outer, inner = seeded.dataset, getattr(seeded.dataset, "dataset", None)
        if inner is None or hasattr(outer, "indices") or len(inner) != len(outer):
            return None
        seeded = SeededFetcher(inner, seeded.collate, seeded.seed)
    return seeded


def _sample(seeded: SeededFetcher, index: int, epoch: int) -> Any:
    samples = seeded.samples(BatchRequest([index], epoch, index))
    return samples[0] if isinstance(samples, list) else samples


def _integers(label: Any) -> set[int]:
    """Return the integers in the label of a sample, or in a mapping's entry for it."""
    if isinstance(label, Mapping):
        label = next((label[name] for name in ("labels", "label", "target") if name in label), None)
    if not (isinstance(label, Tensor | int) or hasattr(label, "dtype")):
        return set()
    values = torch.as_tensor(label)
    return set() if values.is_floating_point() or values.dtype == torch.bool else set(values.flatten().tolist())


def splits(sets: Mapping[str, Read]) -> Finding:
    """Look for samples of validation and test sets in the training data.

    Args:
        sets: by key, `train`, `val`, `test/a`.
    """
    train = sets.get("train")
    others = {key: one for key, one in sets.items() if key != "train" and not one.draws}
    if train is None or len(sets) < 2:
        return Finding("not judged", "data.train and another data set would need indices")
    if train.draws or not others:
        drawn = next(key for key, one in sets.items() if one.draws).replace("/", ".")
        return Finding("not judged", f"samples of data.{drawn} are drawn at random, so they cannot be compared")
    counts = Counter(train.hashes)
    copies = sum(count for count in counts.values() if count > 1) / len(train.hashes)
    told = []
    for key, one in others.items():
        known, read_of = sum(sample in counts for sample in one.hashes), len(one.hashes)
        expected = (copies + _FEW) * read_of
        if known > expected + 3 * expected**0.5:
            remedy = "Split the data before you make the data sets, so that each sample is in one of them."
            text = f"{known} of {read_of} samples are in data.train, too"
            return Finding("problem", text, f"data.{key.replace('/', '.')}", remedy)
        told.append(f"{known} of {read_of} samples of {key}")
    return Finding("ok", f"of {len(train.hashes)} samples of train: {', '.join(told)} are the same")


def labels(engine: Engine, sets: Mapping[str, Read]) -> Finding:
    """Compare the labels of the data with the number of outputs of a model that classifies."""
    known = {key: one for key, one in sets.items() if one.labels}
    found = cross_entropy_of(engine)
    if found is None or not known:
        return Finding("not judged", "the task has no cross-entropy over classes, or samples are not (inputs, label)")
    classes = found[0].shape[1]
    ignored = ignored_label(engine.task)
    for key, one in known.items():
        if not one.labels - {ignored} <= {*range(classes)}:
            wrong = labels_error(engine.task, torch.tensor([*one.labels]), classes, f"data.{key.replace('/', '.')}")
            return Finding("problem", wrong.problem, wrong.key, wrong.remedy)
    everywhere = set[int]().union(*(one.labels for one in known.values())) - {ignored}
    never = [label for label in (0, classes - 1) if label not in everywhere]
    if never and all(len(one.hashes) == one.samples for one in known.values()):
        low, high = min(everywhere), max(everywhere)
        remedy = f"The labels are {low} to {high}. Number them from 0, and let the model have {high - low + 1} outputs."
        text = f"the model has {classes} outputs, and no sample has the label {never[0]}"
        return Finding("problem", text, "task.model", remedy)
    return Finding("ok", f"{len(everywhere)} labels for the model's {classes} outputs")


def cross_entropy_of(engine: Engine) -> tuple[Tensor, Tensor] | None:
    """Return the outputs `[N, C, …]` for the first training batch and the labels, if the loss is their cross-entropy.

    Returns:
        None for another loss, or if the task fails, as training then shows.
    """
    task = engine.task
    batch = next(engine.batches.on_device(engine.loaders.train, count=1), None)
    if task.steps or batch is None:
        return None
    task.eval()
    try:
        with torch.no_grad():
            if isinstance(task.loss, nn.CrossEntropyLoss | nn.NLLLoss):  # which fails for labels outside
                outputs, labels = task.model(batch[0]), batch[1]
            else:
                result = task(batch)
                outputs, labels = result["outputs"], result["targets"]
                torch.testing.assert_close(result["loss"], cross_entropy(outputs, labels), rtol=1e-3, atol=1e-5)
    except Exception:
        return None
    if not (isinstance(outputs, Tensor) and isinstance(labels, Tensor)) or labels.is_floating_point():
        return None
    return (outputs, labels) if labels.shape == outputs.shape[:1] + outputs.shape[2:] else None
