"""Models and data of other packages by config alone, each killed twice and resumed to the same weights.

    python scripts/benchmarks/any_model.py [bert vit stream lora freeze task] [options of all runs]
    python scripts/benchmarks/any_model.py bert stream distributed.nproc_per_node=2 engine.accumulate=3

Each case is a project in a temporary folder: train.py, conf/config.yaml and, if it is needed, a Python file. It is
trained without interruption. Then it is trained again, killed in two places and resumed each time. The model, the state
of the optimizer and the averaged weights at the end are compared bit by bit. The table has the lines of Python of each
project, without train.py and empty lines. Models have random weights and are small.

timm is found in .venv/vision, where scripts/example_packages.sh installs it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
VISION = (ROOT / "tests" / "examples" / "cpu_torchvision", Path(sys.prefix) / "vision", ROOT)
TRAIN = 'import hydraloop\n\nhydraloop.main(trusted=["datasets", "peft", "timm", "transformers"])\n'
DEFAULTS = """
defaults:
  - hydraloop
  - data: {data}
  - task: {task}
  - model: {model}
  - optimizer: adamw
  - scheduler: cosine
  - precision: {precision}
  - default_hooks: [runtime_info, timer, sampler_seed, grad_clip, logger, param_scheduler, checkpoint, progress]
  - hooks: [{hooks}]
  - _self_
engine: {{threads: 1, max_epochs: 3, test: false}}
default_hooks:
  checkpoint: {{by_epoch: false, interval: 4}}
"""
BERT = """
_target_: transformers.BertForSequenceClassification
config:
  _target_: transformers.BertConfig
  vocab_size: 384
  hidden_size: 64
  num_hidden_layers: 2
  num_attention_heads: 2
  intermediate_size: 128
  pad_token_id: 0
  num_labels: 3
"""
REVIEWS = """
data:
  train: {_target_: datasets.load_dataset, path: json, data_files: train.json, split: train, cache_dir: cache}
  val: {_target_: datasets.load_dataset, path: json, data_files: val.json, split: train, cache_dir: cache}
  loader:
    batch_size: 8
    collate_fn:
      _target_: hydraloop.data.Tokenize
      tokenizer: {_target_: transformers.ByT5Tokenizer}
      max_length: 64
      collate_fn: {_target_: transformers.DataCollatorWithPadding, tokenizer: "${..tokenizer}"}
task:
  metrics:
    accuracy: {_target_: hydraloop.tasks.Accuracy}
"""
LORA = """
_target_: peft.get_peft_model
peft_config: {_target_: peft.LoraConfig, r: 4, target_modules: [query, value], modules_to_save: [classifier]}
"""
VIT = """
_target_: timm.create_model
model_name: vit_tiny_patch16_224
img_size: 8
patch_size: 2
in_chans: 1
num_classes: 10
embed_dim: 64
depth: 2
num_heads: 2
proj_drop_rate: 0.1
"""
LLAMA = """
_target_: transformers.LlamaForCausalLM
config:
  _target_: transformers.LlamaConfig
  vocab_size: 384
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 2
  num_attention_heads: 2
  max_position_embeddings: 64
  attention_dropout: 0.1
  pad_token_id: 0
"""
STREAM = """
data:
  train: {_target_: datasets.load_dataset, path: text, data_files: "*.txt", split: train, streaming: true}
  loader:
    batch_size: 8
    num_workers: 2
    steps_per_epoch: 11
    collate_fn:
      _target_: hydraloop.data.Tokenize
      tokenizer: {_target_: transformers.ByT5Tokenizer}
      max_length: 64
      collate_fn: {_target_: transformers.DataCollatorForLanguageModeling, tokenizer: "${..tokenizer}", mlm: false}
"""
FREEZE = """
distributed: {nproc_per_node: 2}
hooks:
  freeze: {modules: [features], epochs: 2}
"""
RECONSTRUCTION = """
from hydraloop import Task


class Reconstruction(Task):
    def forward(self, batch):
        images = batch[0].flatten(1)
        outputs = self.model(images)
        return {"loss": (outputs - images).square().mean(), "largest": outputs.max()}
"""
DYING = """
import os
import signal

import hydraloop


class Dying(hydraloop.Hook):
    def __init__(self, at):
        self.at = at

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        if engine.progress.iteration == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Case:
    """A project.

    Args:
        title: in the table.
        defaults: options of the defaults list that are not the usual ones.
        model: the node of the model; empty: that of the defaults list.
        config: what else conf/config.yaml has.
        python: the contents of `reconstruction.py`; empty: no such file.
    """

    title: str
    defaults: dict[str, str]
    model: str = ""
    config: str = ""
    python: str = ""

    def write(self, folder: Path) -> None:
        """Write the files of the project, its data and the hook that kills it."""
        options = {"data": "digits", "task": "classification", "model": "null", "precision": "fp32", "hooks": ""}
        model = "task:\n  model:\n" + textwrap.indent(self.model, "    ") if self.model else ""
        config = [DEFAULTS.format_map(options | self.defaults), model, self.config]
        # Mappings with the same key (task) are merged.
        merged = OmegaConf.merge(*map(OmegaConf.create, config))
        (folder / "conf").mkdir()
        (folder / "conf" / "config.yaml").write_text(OmegaConf.to_yaml(merged))
        (folder / "train.py").write_text(TRAIN)
        (folder / "dying.py").write_text(DYING)
        if self.python:
            (folder / "reconstruction.py").write_text(self.python)
        draw = random.Random(0)
        words = {
            label: [f"{name}{number}" for number in range(9)] for label, name in enumerate(("good", "bad", "fair"))
        }
        for name, size in (("train", 90), ("val", 20)):
            labels = [draw.randrange(3) for _ in range(size)]
            samples = [
                {"text": " ".join(draw.choices(words[label], k=draw.randint(1, 9))), "label": label} for label in labels
            ]
            (folder / f"{name}.json").write_text("\n".join(map(json.dumps, samples)))
        for name in "abcd":
            lines = [" ".join(draw.choices(words[0], k=draw.randint(1, 9))) for _ in range(100)]
            (folder / f"{name}.txt").write_text("\n".join(lines))

    @property
    def lines(self) -> int:
        """Lines of Python that are not empty."""
        return sum(1 for line in self.python.splitlines() if line.strip())


TRANSFORMERS = {"data": "base", "task": "huggingface"}
CASES = {
    "bert": Case("BERT with padding, bf16", TRANSFORMERS | {"precision": "bf16"}, BERT, REVIEWS),
    "vit": Case("timm ViT, EMA", {"hooks": "ema"}, VIT),
    "stream": Case("Hugging Face stream, 2 workers", TRANSFORMERS, LLAMA, STREAM),
    "lora": Case("LoRA of a BERT", TRANSFORMERS, f"{LORA}model:\n{textwrap.indent(BERT, '  ')}", REVIEWS),
    "freeze": Case("frozen, then unfrozen, 2 ranks", {"model": "small_cnn", "hooks": "freeze"}, "", FREEZE),
    "task": Case(
        "a custom task",
        {},
        "_target_: torch.nn.Linear\nin_features: 64\nout_features: 64",
        "task: {_target_: reconstruction.Reconstruction, metrics: {accuracy: null}}",
        RECONSTRUCTION,
    ),
}


def main() -> int:
    """Run the cases and print the table. Returns 1 if a case does not end with the same weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"{' '.join(CASES)}, and options such as engine.accumulate=3")
    given = parser.parse_args().cases
    overrides = [argument for argument in given if "=" in argument]
    chosen = [argument for argument in given if "=" not in argument] or list(CASES)
    print(f"{'case':<34}{'Python':>8}{'iterations':>12}{'killed at':>12}{'same bits':>12}{'seconds':>9}")
    failed = 0
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            failed += not compare(CASES[name], Path(folder), overrides)
    return int(failed > 0)


def compare(case: Case, folder: Path, overrides: list[str]) -> bool:
    """Train a project without and with interruptions, and print its line of the table."""
    start = perf_counter()
    case.write(folder)
    train(folder, "uninterrupted", *overrides)
    expected, last = final_state(folder / "uninterrupted")
    places = (last * 3 // 10, last * 7 // 10)
    for at in places:
        train(
            folder,
            "killed",
            *overrides,
            "resume=auto",
            f"+hooks.dying={{_target_: dying.Dying, at: {at}}}",
            killed=True,
        )
    train(folder, "killed", *overrides, "resume=auto")
    found, _ = final_state(folder / "killed")
    equal = same(found, expected)
    killed_at = ", ".join(map(str, places))
    seconds = perf_counter() - start
    print(
        f"{case.title:<34}{case.lines:>8}{last:>12}{killed_at:>12}{'yes' if equal else 'NO':>12}{seconds:>9.0f}",
        flush=True,
    )
    return equal


def train(folder: Path, run: str, *overrides: str, killed: bool = False) -> None:
    """`python train.py` in the folder. Exits if it does not end as expected."""
    paths = [str(path) for path in VISION if path.exists()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", f"hydra.run.dir={run}", *overrides]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if (done.returncode != 0) != killed:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def final_state(run: Path) -> tuple[dict[str, Any], int]:
    """Return the model's, the optimizer's and the averaged weights' state at the end of a run, and its iterations."""
    folder = run / "checkpoints"
    checkpoint = torch.load(folder / (folder / "last_checkpoint").read_text().strip(), weights_only=True)
    ema = checkpoint["hooks"].get("ema")
    return {"ema": ema, **{name: checkpoint[name] for name in ("state_dict", "optimizer")}}, checkpoint["meta"][
        "iteration"
    ]


def same(one: Any, other: Any) -> bool:
    """Return whether two states have the same tensors, bit by bit, and the same numbers."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


if __name__ == "__main__":
    sys.exit(main())
