"""Text from a trained language model of bytes (experiment=char_lm).

    python scripts/sample.py outputs/<date>/<run> --prompt "def " --length 300 --temperature 0.8 --seed 0

The model is built as its checkpoint's own config says, behind the same allowlist as in training, and has the averaged
weights where the run kept an average. The same seed gives the same text.
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
    """Print the text. Returns the exit code: 1 for a mistake, which is printed in one message."""
    options = _parser().parse_args(arguments)
    try:
        model = load_model(checkpoint_at(options.run), weights=options.weights)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    print(sample(model, options.prompt, options.length, options.temperature, options.top_k, options.seed))
    return 0


def checkpoint_at(path: Path) -> Path:
    """The file itself, or of a run directory the checkpoint written last.

    Raises:
        UserError: there is no such path, or no complete checkpoint in the directory.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"there is no {path}", remedy="Name a run directory, outputs/<date>/<run>, or a checkpoint.")
    newest = newest_complete(*checkpoint_folders(path))
    if newest is None:
        raise UserError(f"{path} has no complete checkpoint", remedy="Name another run directory, or a checkpoint.")
    return newest


def load_model(path: Path, weights: str = "averaged") -> GPT:
    """The GPT in a checkpoint, on the CPU.

    Args:
        weights: `averaged`, where there are such, or `raw`.

    Raises:
        UserError: it is no checkpoint, has no config, or its model is no GPT of bytes.
    """
    checkpoint = load(path, key="run")
    written = checkpoint.get("meta", {}).get("config")
    if written is None:
        raise UserError(f"{path} does not say what model it is of", remedy="Use a checkpoint that a run has written.")
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
        raise UserError(f"the weights in {path} do not fit its own config: {error}") from error
    return model


def sample(
    model: GPT, prompt: str, length: int = 300, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
) -> str:
    """The prompt and `length` more bytes as text; the byte between two files becomes an empty line."""
    tokens = torch.tensor([list(prompt.encode()) or [SEPARATOR]])
    generator = torch.Generator().manual_seed(seed)
    written = model.generate(tokens, length, temperature, top_k, generator)
    text = bytes(written[0].tolist()).decode(errors="replace")
    return text.replace(chr(SEPARATOR), "\n").removeprefix("" if prompt else "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run directory, whose newest checkpoint is used, or a checkpoint file")
    parser.add_argument("--prompt", default="def ", help="what the text begins with; '' begins a new file")
    parser.add_argument("--length", type=_at_least(int, 1), default=300, help="bytes to add")
    parser.add_argument(
        "--temperature", type=_at_least(float, 0), default=0.8, help="0 takes the most likely byte, 1 draws as learnt"
    )
    parser.add_argument("--top-k", type=_at_least(int, 1), help="draw among so many of the most likely bytes only")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument(
        "--weights", choices=["averaged", "raw"], default="averaged", help="which, where there are both"
    )
    return parser


def _at_least(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no {'number' if kind is float else 'whole number'}"
            ) from None
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is below {least}" if value < least else f"{text} is no number")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
