"""Texts are tokenized when a batch is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hydraloop.data import Tokenize

SAMPLES = [{"text": "ab", "label": 1, "source": "x"}, {"text": "cdefg", "label": 0, "source": "y"}]


def in_bytes(texts: list[str], truncation: bool, max_length: int | None) -> dict[str, list[list[int]]]:
    """A tokenizer with the interface of transformers."""
    ids = [list(text.encode())[: max_length if truncation else None] for text in texts]
    return {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask")
    assert all({*sample} == {*names, "label", "source"} for sample in samples)
    columns = {name: [torch.tensor(sample[name]) for sample in samples] for name in names}
    labels = torch.tensor([sample["label"] for sample in samples])
    return {**{name: pad_sequence(column, batch_first=True) for name, column in columns.items()}, "labels": labels}


def test_texts_become_tokens_and_the_rest_of_a_sample_stays() -> None:
    batch = Tokenize(in_bytes, padded)(SAMPLES)
    assert batch["input_ids"].tolist() == [[97, 98, 0, 0, 0], [99, 100, 101, 102, 103]]
    assert batch["labels"].tolist() == [1, 0]


def test_long_texts_are_cut_off() -> None:
    assert Tokenize(in_bytes, padded, max_length=3)(SAMPLES)["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
