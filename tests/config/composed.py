"""The command lines whose composed configs are in golden/.

`default.yaml` is a whole config. Each other file lists what a command line adds to it (+) and removes from it (-), a
key with its value a line, below the key that it follows. After an intended change, run
`python -m tests.config.composed` and read the diff.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict

from hydraloop.config import arguments, checks
from hydraloop.config import compose as composing
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps.axes import jobs_of
from hydraloop.sweeps.overrides_to_axes import select

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"

SINGLE: dict[str, list[str]] = {
    "default": [],
    "hooks": ["hooks=ema,profiler"],
    "priorities": ["hooks=[ema,profiler]", "hooks.ema.priority=HIGH", "hooks.profiler.priority=45"],
    "changed_default_hooks": ["default_hooks.checkpoint.interval=5", "~default_hooks.logger"],
    "no_checkpoint": ["default_hooks.checkpoint=null"],
    "own_hook": ["+hooks.mine._target_=my_project.hooks.MyHook", "+hooks.mine.priority=30"],
    "own_hook_as_an_option": ["hooks=weight_norm,ema", "hooks.weight_norm.digits=4"],
    "diabetes": ["experiment=diabetes", "optimizer.lr=3e-3"],
    "spirals": ["experiment=spirals", "engine.accumulate=4"],
    "fp16": ["precision=fp16", "precision.init_scale=1024"],
    "char_lm": ["experiment=char_lm", "engine.accumulate=2", "data.train.block_size=64"],
    "trackers": ["hooks=mlflow,wandb,tensorboard", "hooks.mlflow.tracking_uri=http://localhost:5000"],
    "fast": ["debug=fast", "optimizer=sgd", "scheduler=[linear,cosine]"],
}
SWEEPS: dict[str, list[str]] = {
    "sweep_hook_sets": ["optimizer.lr=1e-3,1e-2", "hooks=[],[ema]"],
    "sweep_several_optimizers": [
        "~optimizer",
        "+optimizer@optimizer.hidden=muon",
        "+optimizer@optimizer.rest=adamw",
        "optimizer.hidden.match='@matrix|!classifier'",
        "+scheduler@scheduler.warmup=linear",
        "scheduler.warmup.optimizer=rest",
        "optimizer.hidden.lr=0.01,0.02",
    ],
    "sweep_priority": ["hooks=[ema]", "hooks.ema.priority=HIGH,LOW"],
    "sweep_hooks": ["hooks=ema,profiler"],
}


@contextmanager
def composer(folder: Path = REPOSITORY / "conf") -> Iterator[composing.Composer]:
    """A composer for the repository's conf/."""
    with composing.opened(folder, "config") as opened:
        yield opened


def job(lines: Sequence[str], opened: composing.Composer) -> DictConfig:
    """The config of a job."""
    cfg = copy.deepcopy(checks.compose_job(lines, opened))  # a composer may return the same object twice
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def all_composed() -> Iterator[tuple[str, list[str], DictConfig]]:
    """(name, command, config) of every command line, and of each job of a sweep; the default first."""
    with composer() as opened:
        for name, typed in SINGLE.items():
            lines, _ = arguments.with_hook_lists(typed)
            yield name, ["python train.py", *typed], job(lines, opened)
        for name, typed in SWEEPS.items():
            axes = select(arguments.parse(typed), [], OmegaConf.structured(SweepConf))
            assert isinstance(axes, list)
            for number, lines in enumerate(jobs_of(axes)):
                yield f"{name}.{number}", ["python train.py -m", *typed], job(lines, opened)


def golden_files(composed: Iterable[tuple[str, list[str], DictConfig]]) -> dict[str, str]:
    """The text of each golden file, for what `all_composed` yields."""
    (_, _, default), *others = composed
    files = {"default.yaml": OmegaConf.to_yaml(default)}
    for name, command, cfg in others:
        changes = _changes(_lines(default), _lines(cfg))
        files[f"{name}.diff"] = "\n".join([f"# {' '.join(command)}", *changes, ""])
    return files


def _changes(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    for kind, begin, end, new, new_end in SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes():
        if kind != "equal":
            yield f"after {before[begin - 1].partition(':')[0]}"
            yield from (f"- {line}" for line in before[begin:end])
            yield from (f"+ {line}" for line in after[new:new_end])


def _lines(cfg: DictConfig) -> list[str]:
    return list(_flat(cast(dict[str, Any], OmegaConf.to_container(cfg, enum_to_str=True))))


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `key: value` of each value that is no mapping with entries, in order."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {json.dumps(value)}"


def main() -> None:
    """Write the golden files."""
    for old in GOLDEN.iterdir():
        old.unlink()
    for name, text in golden_files(all_composed()).items():
        (GOLDEN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
