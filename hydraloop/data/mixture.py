"""Training on several sets: `data.train={a: {…}, b: {…}}`, with `data.weights` or `data.lengths`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Sampler

from hydraloop.errors import UserError, suggestion


@dataclass(frozen=True)
class StreamMixture:
    """Streams, and how often a sample is drawn from each."""

    datasets: list[Any]
    weights: list[float]


class MixtureSampler(Sampler[int]):
    """Indices of a ConcatDataset, shuffled: a given number from each of its sets.

    A set with fewer samples is repeated as a whole; the rest is drawn from it at random, without repeating a sample.
    Draws from torch's global generator.

    Args:
        sizes: samples of each set.
        counts: indices of each set to yield.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int]) -> None:
        self.sizes, self.counts = sizes, counts

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[int]:
        chosen, first = [], 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            repeats, rest = divmod(count, size)
            chosen += [torch.arange(size).repeat(repeats) + first, torch.randperm(size)[:rest] + first]
            first += size
        indices = torch.cat(chosen)
        order: list[int] = indices[torch.randperm(len(indices))].tolist()
        return iter(order)


def mix_streams(streams: Mapping[str, Any], weights: Mapping[str, float], lengths: Mapping[str, int]) -> StreamMixture:
    """Return streams with their weights.

    Raises:
        UserError: there are no weights, or there are lengths.
    """
    if lengths or not weights:
        example = ", ".join(f"{name}: 1" for name in streams)
        raise UserError(
            "several streams are mixed by weights, because they may have no end",
            key="data.lengths" if lengths else "data.weights",
            remedy=f"Set 'data.weights={{{example}}}'{' instead' if lengths else ''}.",
        )
    _check("data.weights", weights, streams, every=True)
    return StreamMixture(list(streams.values()), [weights[name] for name in streams])


def join_sets(
    sets: Mapping[str, Any], weights: Mapping[str, float], lengths: Mapping[str, int]
) -> tuple[ConcatDataset[Any], MixtureSampler | None]:
    """Return sets with indices as one, and the sampler of an epoch. None: each sample once.

    Args:
        weights: share of each set in an epoch, which has as many samples as all sets together; or empty.
        lengths: samples of a set in an epoch; a set without a length has all its samples in it. Or empty.

    Raises:
        UserError: both are given, a set is empty, a name is unknown or missing, or a number is not positive.
    """
    joined: ConcatDataset[Any] = ConcatDataset(sets.values())
    sizes = [len(one) for one in sets.values()]
    if 0 in sizes:
        name = [*sets][sizes.index(0)]
        raise UserError("the data set is empty", key=f"data.train.{name}", remedy="Check its path and its split.")
    if weights and lengths:
        raise UserError("there are data.lengths too", key="data.weights", remedy="Leave one of the two out.")
    if weights:
        _check("data.weights", weights, sets, every=True)
        shares = [weights[name] * len(joined) / sum(weights.values()) for name in sets]
        return joined, MixtureSampler(sizes, [max(round(share), 1) for share in shares])
    if lengths:
        _check("data.lengths", lengths, sets, every=False)
        return joined, MixtureSampler(sizes, [lengths.get(name, size) for name, size in zip(sets, sizes, strict=True)])
    return joined, None


def _check(key: str, numbers: Mapping[str, float], sets: Mapping[str, Any], *, every: bool) -> None:
    for name, number in numbers.items():
        if name not in sets:
            raise UserError("there is no such set in data.train", key=f"{key}.{name}", remedy=suggestion(name, sets))
        counted = isinstance(number, int if key == "data.lengths" else (int, float)) and not isinstance(number, bool)
        if not counted or not 0 < number < math.inf:
            raise UserError(f"cannot be {number!r}", key=f"{key}.{name}", remedy="Use a positive number.")
    missing = [name for name in sets if name not in numbers]
    if every and missing:
        raise UserError(f"{missing[0]} has no weight", key=key, remedy=f"Add one: {missing[0]}: 1.")
