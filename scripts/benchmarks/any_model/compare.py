"""Models and data of other packages by config alone, each killed twice and resumed to the same weights.

    python scripts/benchmarks/any_model/compare.py [bert vit stream lora freeze task] [options of all runs]
    python scripts/benchmarks/any_model/compare.py bert stream distributed.nproc_per_node=2 engine.accumulate=3

Each case is a config in this folder. `task` also uses `reconstruction.py`, and texts `tokenizing.py`. A case is a
project in a temporary folder, which is trained without interruption. Then it is trained again, killed in two places and
resumed each time. The model, the state of the optimizer and the averaged weights at the end are compared bit by bit.
Models have random weights and are small.

timm is found in .venv/vision, where scripts/example_packages.sh installs it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VISION = (ROOT / "tests" / "examples" / "cpu_torchvision", Path(sys.prefix) / "vision", ROOT)
CASES = sorted(path.stem for path in HERE.glob("*.yaml"))
TRAIN = 'import hydraloop\n\nhydraloop.main(trusted=["datasets", "peft", "timm", "transformers"])\n'
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


def write(case: str, folder: Path) -> None:
    """Write the files of a project, its data and the hook that kills it."""
    (folder / "conf").mkdir()
    shutil.copy(HERE / f"{case}.yaml", folder / "conf" / "config.yaml")
    for name in ("reconstruction.py", "tokenizing.py"):
        shutil.copy(HERE / name, folder)
    (folder / "train.py").write_text(TRAIN)
    (folder / "dying.py").write_text(DYING)
    draw = random.Random(0)
    words = [[f"{name}{number}" for number in range(9)] for name in ("good", "bad", "fair")]
    for name, size in (("train", 90), ("val", 20)):
        labels = [draw.randrange(3) for _ in range(size)]
        samples = [{"text": sentence(draw, words[label]), "label": label} for label in labels]
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, samples)))
    for name in "abcd":
        (folder / f"{name}.txt").write_text("\n".join(sentence(draw, words[0]) for _ in range(100)))


def sentence(draw: random.Random, words: list[str]) -> str:
    """Return one to nine random words."""
    return " ".join(draw.choices(words, k=draw.randint(1, 9)))


def main() -> int:
    """Run the cases and print the table. Returns 1 if a case does not end with the same weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"{' '.join(CASES)}, and options such as engine.accumulate=3")
    given = parser.parse_args().cases
    overrides = [argument for argument in given if "=" in argument]
    chosen = [argument for argument in given if "=" not in argument] or CASES
    print("| project | iterations | killed at | same bits | seconds |\n|---|---|---|---|---|")
    failed = 0
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            failed += not compare(name, Path(folder), overrides)
    return int(failed > 0)


def compare(case: str, folder: Path, overrides: list[str]) -> bool:
    """Train a project without and with interruptions, and print its line of the table."""
    start = perf_counter()
    write(case, folder)
    train(folder, "uninterrupted", *overrides)
    expected, last = final_state(folder / "uninterrupted")
    places = (last * 3 // 10, last * 7 // 10)
    for at in places:
        hook = f"+hooks.dying={{_target_: dying.Dying, at: {at}}}"
        train(folder, "killed", *overrides, "resume=auto", hook, killed=True)
    train(folder, "killed", *overrides, "resume=auto")
    equal = same(final_state(folder / "killed")[0], expected)
    killed_at, seconds = ", ".join(map(str, places)), perf_counter() - start
    print(f"| {case} | {last} | {killed_at} | {'yes' if equal else 'NO'} | {seconds:.0f} |", flush=True)
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
