"""A collate function that tokenizes texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Tokenize:
    """A collate function for samples with a text: tokenizes the texts, and lets another collate function pad them.

    A sample is a mapping, `{"text": "…", "label": 2}`. Its text becomes what the tokenizer returns (`input_ids`,
    `attention_mask`); other entries stay.

    Args:
        tokenizer: of transformers, or one that is called in the same way.
        collate_fn: makes a batch of the tokenized samples, such as transformers' `DataCollatorWithPadding`.
        text: the entry with the text.
        max_length: number of tokens; the rest of a longer text is cut off. None: nothing is cut off.
    """

    def __init__(
        self,
        tokenizer: Callable[..., Mapping[str, Sequence[Any]]],
        collate_fn: Callable[[list[dict[str, Any]]], Any],
        text: str = "text",
        max_length: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.collate_fn = collate_fn
        self.text = text
        self.max_length = max_length

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Any:
        """Return what `collate_fn` makes of the samples."""
        texts = [sample[self.text] for sample in samples]
        tokens = self.tokenizer(texts, truncation=self.max_length is not None, max_length=self.max_length)
        return self.collate_fn(
            [
                {
                    **{name: value for name, value in sample.items() if name != self.text},
                    **{name: of_texts[index] for name, of_texts in tokens.items()},
                }
                for index, sample in enumerate(samples)
            ]
        )
