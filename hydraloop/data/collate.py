"""Makes a batch of samples, also of texts, and names the sample that cannot be put into a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from hydraloop.errors import UserError
from hydraloop.run_files.result import describe


class Collate:
    """Makes a batch of a list of samples. A class, so that workers can unpickle it.

    Args:
        collate_fn: of the user. None: torch's `default_collate`, and a batch that the data set has stacked stays as it
            is.
        key: of `collate_fn` in the config, for errors.
    """

    def __init__(self, collate_fn: Callable[[Any], Any] | None, key: str) -> None:
        self.stack, self.key, self.given = collate_fn or default_collate, key, collate_fn is not None

    def __call__(self, fetched: Any) -> Any:
        if isinstance(fetched, list):
            return self.stack(fetched)
        if self.given:
            raise UserError(
                "it would have no effect, because the data set returns whole batches from __getitems__",
                key=self.key,
                remedy="Leave it out. For other data alone, set it in data.train_loader or data.val_loader.",
            )
        return fetched

    @property
    def name(self) -> str:
        """The name of the function, or of the class."""
        function = getattr(self.stack, "func", self.stack)
        return getattr(function, "__name__", type(function).__name__)


def as_is(batch: Any) -> Any:
    """Return a batch that is already made; at module level, so that workers can unpickle it."""
    return batch


def collate_error(
    collate: Any, samples: Sequence[Any], numbers: Sequence[int], key: str, shown: str = "it"
) -> UserError | None:
    """Return the error that says for which sample `collate` fails; None if it does not fail.

    Args:
        collate: a `Collate`.
        samples: of a batch.
        numbers: of the samples, for the message.
        key: of the data set in the config.
        shown: how to look at a sample, with {} for its number.
    """
    error = _failure(collate, samples)
    if error is None or isinstance(error, UserError):
        return error
    for number, sample in zip(numbers, samples, strict=True):
        for together in ([sample], [samples[0], sample]):
            failure = _failure(collate, together)
            if failure is not None:
                with_first = "" if len(together) == 1 else f" together with sample {numbers[0]}"
                return UserError(
                    f"{collate.name} fails for sample {number} of {key}{with_first}: {describe(failure)}",
                    key=collate.key,
                    remedy=f"Look at {shown.format(number)}, or set {collate.key} to a function that can batch it.",
                )
    return UserError(
        f"{collate.name} fails for the samples {[*numbers]} of {key}: {describe(error)}",
        key=collate.key,
        remedy="Set it to a function that can batch them.",
    )


def _failure(collate: Callable[[Any], Any], samples: Sequence[Any]) -> Exception | None:
    try:
        collate(samples)
    except Exception as error:
        return error
    return None


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
