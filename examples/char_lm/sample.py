"""Generate text with a trained language model of bytes.

    python sample.py outputs/<date>/<run> --prompt "def " --length 300 --temperature 0.8 --seed 0

The model is built from the config of its run, with the same allowlist as in training. It uses averaged weights if the
run has them. The same seed gives the same text.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hydraloop
from hydraloop.errors import UserError
from hydraloop.files.run_directory import run_of

BYTES = 256
SEPARATOR = 0
"""The byte between two files."""


def main(arguments: list[str] | None = None) -> int:
    """Print the text. Returns the exit code: 0, or 1 after an error message."""
    options = _parser().parse_args(arguments)
    try:
        model = load_model(options.run, options.weights)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not support every character
    print(sample(model, options.prompt, options.length, options.temperature, options.top_k, options.seed))
    return 0


def load_model(path: Path, weights: str = "averaged") -> nn.Module:
    """Return the GPT of a run, on the CPU in eval mode.

    Args:
        path: a run directory, whose last checkpoint is used, or a checkpoint in it.
        weights: `averaged` (raw if there are no averaged weights), or `raw`.

    Raises:
        UserError: there is no such run or checkpoint, or its model is not a GPT of bytes.
    """
    run, checkpoint = (path, "last") if path.is_dir() else (run_of(path), str(path.absolute()))
    if run is None:
        raise UserError(f"{path} is not in a run directory", remedy="Name a run, outputs/<date>/<run>.")
    overrides = [f"weights={weights}", "engine.device=cpu", "engine.compile=false"]
    # A run of `experiment=char_lm` in a clone of hydraloop names the class examples.char_lm.gpt.GPT.
    model = hydraloop.load(run, checkpoint=checkpoint, overrides=overrides, trusted=["examples"]).model
    if type(model).__name__ != "GPT" or model.vocab_size != BYTES:
        what = f"a GPT of {model.vocab_size} tokens" if type(model).__name__ == "GPT" else f"a {type(model).__name__}"
        raise UserError(
            f"the model of {run} is {what}, not a GPT of {BYTES} bytes",
            remedy="Train one: python train.py",
        )
    return model.eval()


def sample(
    model: nn.Module, prompt: str, length: int = 300, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
) -> str:
    """Return the prompt and `length` more bytes as text. The byte between two files becomes a newline."""
    tokens = torch.tensor([list(prompt.encode()) or [SEPARATOR]])
    generator = torch.Generator().manual_seed(seed)
    written = model.generate(tokens, length, temperature, top_k, generator)
    text = bytes(written[0].tolist()).decode(errors="replace")
    return text.replace(chr(SEPARATOR), "\n").removeprefix("" if prompt else "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run directory, whose newest checkpoint is used, or a checkpoint file")
    parser.add_argument("--prompt", default="def ", help="beginning of the text; '' starts a new file")
    parser.add_argument("--length", type=_at_least(int, 1), default=300, help="bytes to add")
    parser.add_argument(
        "--temperature",
        type=_at_least(float, 0),
        default=0.8,
        help="0 takes the most likely byte, 1 samples from the model",
    )
    parser.add_argument("--top-k", type=_at_least(int, 1), help="sample only from this many of the most likely bytes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument(
        "--weights", choices=["averaged", "raw"], default="averaged", help="which weights to use if there are both"
    )
    return parser


def _at_least(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a {'number' if kind is float else 'whole number'}"
            ) from None
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is below {least}" if value < least else f"{text} is not a number")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
