"""A data set of texts from Python's standard library: documentation and code."""

import ast
import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset


class Sources(Dataset):
    """First lines of docstrings (label 0) and of statements (label 1) in asyncio: `{"input_ids": …, "label": …}`.

    Args:
        part: of every ten samples, `train` has the first eight, `val` the next one and `test` the last one.
        tokenizer: of transformers.
        max_length: number of tokens; the rest of a longer text is cut off.
    """

    def __init__(self, part: str, tokenizer: Callable[..., dict[str, Any]], max_length: int) -> None:
        documentation, code = set(), set()
        for file in Path(asyncio.__file__).parent.glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    documentation.add(ast.get_docstring(node))
                elif isinstance(node, ast.Assign | ast.Return | ast.Raise):
                    code.add(ast.unparse(node))
        texts = {0: sorted(filter(None, documentation)), 1: random.Random(0).sample(sorted(code), 500)}
        samples = [
            {**tokenizer(text.splitlines()[0], truncation=True, max_length=max_length), "label": label}
            for label in texts
            for text in texts[label]
        ]
        places = {"train": range(8), "val": [8], "test": [9]}[part]
        self.samples = [sample for number, sample in enumerate(samples) if number % 10 in places]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]
