"""Generate text with a trained language model of bytes (experiment=char_lm).

    python scripts/sample.py outputs/<date>/<run> --prompt "def " --length 300 --temperature 0.8 --seed 0

The model is built from the config in its checkpoint, with the same allowlist as in training. It uses averaged weights
if the run has them. The same seed gives the same text.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from hydraloop.data.python_sources import SEPARATOR
from hydraloop.engine.checkpoint.format import evaluation_weights, load
from hydraloop.errors import UserError
from hydraloop.models import GPT
from hydraloop.run.checkpoint_files import newest_complete
from hydraloop.run.directory import checkpoint_folders
from hydraloop.safety.instantiate import instantiate

BYTES = 256


def main(arguments: list[str] | None = None) -> int:
    """Print the text. Returns the exit code: 0, or 1 after an error message."""
    options = _parser().parse_args(arguments)
    try:
        model = load_model(checkpoint_at(options.run), weights=options.weights)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not support every character
    print(sample(model, options.prompt, options.length, options.temperature, options.top_k, options.seed))
    return 0


def checkpoint_at(path: Path) -> Path:
    """Return the path if it is a file, or the last checkpoint of a run directory.

    Raises:
        UserError: the path does not exist, or the directory has no complete checkpoint.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path} does not exist", remedy="Give a run directory, outputs/<date>/<run>, or a checkpoint.")
    newest = newest_complete(*checkpoint_folders(path))
    if newest is None:
        raise UserError(f"{path} has no complete checkpoint", remedy="Give another run directory, or a checkpoint.")
    return newest


def load_model(path: Path, weights: str = "averaged") -> GPT:
    """Load the GPT in a checkpoint, on the CPU.

    Args:
        path: path of the checkpoint.
        weights: `averaged` (raw if there are no averaged weights), or `raw`.

    Raises:
        UserError: the file is not a checkpoint, has no config, or its model is not a GPT of bytes.
    """
    checkpoint = load(path, key="run")
    written = checkpoint.get("meta", {}).get("config")
    if written is None:
        raise UserError(f"{path} does not contain the config of its model", remedy="Use a checkpoint of a run.")
    cfg = OmegaConf.create(written)
    assert isinstance(cfg, DictConfig)
    model = instantiate(OmegaConf.select(cfg, "task.model"), "task.model")
    if not isinstance(model, GPT) or model.vocab_size != BYTES:
        what = f"{model.vocab_size} tokens" if isinstance(model, GPT) else f"a {type(model).__name__}"
        raise UserError(
            f"the model in {path} is {'a GPT of ' if isinstance(model, GPT) else ''}{what}, not a GPT of {BYTES} bytes",
            remedy="Train one: python train.py experiment=char_lm",
        )
    try:
        model.load_state_dict(evaluation_weights(checkpoint, weights))
    except RuntimeError as error:
        raise UserError(f"the weights in {path} do not match its config: {error}") from error
    return model


def sample(
    model: GPT, prompt: str, length: int = 300, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
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
