"""Text files to stream: the source files of Python's standard library."""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset


def source_lines(part: str, tokenizer: Callable[..., Any], max_length: int) -> IterableDataset:
    """Return the lines of the files as a stream of samples `{"input_ids": …}`, shuffled in a buffer for training.

    Args:
        part: `train` or `val`, which has every tenth file.
        tokenizer: of transformers.
        max_length: number of tokens; the rest of a longer line is cut off.
    """
    files = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))
    chosen = [file for number, file in enumerate(files) if (number % 10 == 0) == (part == "val")]
    lines = load_dataset("text", data_files=chosen, split="train", streaming=True).filter(is_not_blank)
    cut = {"truncation": True, "max_length": max_length}
    lines = lines.map(tokenizer, input_columns="text", remove_columns="text", fn_kwargs=cut)
    return lines.shuffle(seed=0, buffer_size=1000) if part == "train" else lines


def is_not_blank(sample: dict[str, str]) -> bool:
    """Return whether a line has more than spaces."""
    return sample["text"].strip() != ""
