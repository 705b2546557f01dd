"""What `published_keys` writes as safetensors beside the `.pth`, and starting from such a file."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from hydraloop.engine.checkpoint.initial_weights import Rules, initialise
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.checkpoint_copies import ENTRIES
from hydraloop.hooks.ema import EMAHook
from tests.helpers import failing
from tests.hooks.tiny_runs import Scripted, bits, engine_of, load, model, same


def published(run_dir: Path, *keys: str, hooks: dict[str, Any] | None = None, **settings: Any) -> Path:
    """The path of the published safetensors file of a run of one epoch; it may not exist."""
    checkpoint = CheckpointHook(published_keys=keys)
    engine_of(run_dir, {**(hooks or {}), "checkpoint": checkpoint}, max_epochs=1, **settings).train()
    assert (run_dir / "checkpoints" / "epoch_1_published.pth").is_file()
    return run_dir / "checkpoints" / "epoch_1_published.safetensors"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, str] = file.metadata()
    return found


def test_the_weights_are_those_of_the_pth_and_meta_is_in_the_header(tmp_path: Path) -> None:
    path = published(tmp_path, "meta", "state_dict", hooks={"ema": EMAHook(momentum=0.1, warmup=False)})
    source, twin = load(tmp_path / "checkpoints" / "epoch_1.pth"), load(path.with_suffix(".pth"))
    weights = load_file(path)
    assert same(weights, twin["state_dict"])
    averaged = source["hooks"]["ema"]["averaged"]
    assert same({name: weights[name] for name in averaged}, averaged)
    facts = json.loads(metadata(path)["meta"])
    assert facts == json.loads(json.dumps(twin["meta"]))
    assert (facts["epoch"], facts["iteration"]) == (1, 4)
    assert facts["versions"]["torch"] == torch.__version__
    assert "averaged_weights" not in facts, "they are these"
    net = model()
    load_model(net, path)  # safetensors' own way
    assert same(net.state_dict(), weights)


def test_who_can_read_the_pth_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = published(tmp_path, "state_dict")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == path.with_suffix(".pth").stat().st_mode & 0o777 == 0o640


class Tangled(nn.Module):
    """Weights that share memory, wholly and in part, and tensors of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 2)
        together = torch.arange(12.0)
        self.register_buffer("head", together[:6])
        self.register_buffer("tail", together[6:])
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("no_more", torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(self.first(inputs)))
        return result


def test_shared_and_odd_tensors_are_all_in_it(tmp_path: Path) -> None:
    net = Tangled()
    path = published(tmp_path, "state_dict", net=net)
    assert same(load_file(path), net.state_dict())
    fresh = Tangled()
    fresh.load_state_dict(load_file(path))
    assert same(fresh.state_dict(), net.state_dict())


class Extra(nn.Module):
    """A state dict with something more than tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner, self.extra = nn.Linear(3, 2), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(inputs)
        return result


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"seen": 3}, "_extra_state is a dict, not a tensor"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_what_it_cannot_hold_leaves_it_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, extra: Any, reason: str
) -> None:
    stale = tmp_path / "checkpoints" / "epoch_1_published.safetensors"
    stale.parent.mkdir()
    stale.touch()
    with caplog.at_level(logging.INFO):
        path = published(tmp_path, "state_dict", net=Extra(extra))
    assert not path.exists(), "an older file with other weights is deleted"
    lines = [record.getMessage() for record in caplog.records if "safetensors" in record.getMessage()]
    assert len(lines) == 1
    assert "is not written" in lines[0]
    assert reason in lines[0]


def test_meta_is_json_for_any_value(tmp_path: Path) -> None:
    class Notes(EMAHook):
        def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
            notes = {1: (2, float("-inf")), "scale": torch.ones(1), "none": None, "on": True}
            checkpoint["meta"]["notes"] = notes
            checkpoint["meta"]["tensor"] = torch.ones(2)

    metrics = {"acc": Scripted([float("nan"), 0.5])}
    path = published(tmp_path, "meta", "state_dict", hooks={"notes": Notes()}, metrics=metrics, val_interval=1)
    text = metadata(path)["meta"]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    facts = json.loads(text, parse_constant=refuse)
    assert facts["notes"] == {"1": [2, "-inf"], "scale": [1.0], "none": None, "on": True}
    assert facts["tensor"] == [1.0, 1.0]


# Starting from one. --------------------------------------------------------------------------------------------------


def test_load_from_takes_it(tmp_path: Path) -> None:
    path = published(tmp_path / "one", "meta", "state_dict", hooks={"ema": EMAHook()})
    engine = engine_of(tmp_path / "two", {}, load_from=path, max_iters=0)
    engine.train()
    assert same(bits(engine.model), load_file(path))


def _refused(tmp_path: Path, path: Path, **option: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        engine_of(
            tmp_path / "refused", {"never": failing("before_train_iter")}, **{"load_from": path, **option}
        ).train()
    return caught.value


@pytest.mark.parametrize("content", ["cut", "text", "empty", "zip"])
def test_a_broken_file_is_one_message(tmp_path: Path, content: str) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(model().state_dict(), path)
    if content == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif content == "zip":
        torch.save(model().state_dict(), path)
    else:
        path.write_text("hello, this is not a checkpoint" if content == "text" else "")
    error = _refused(tmp_path, path)
    assert error.key == "load_from"
    assert "not a complete safetensors file" in error.problem
    assert error.remedy
    with pytest.raises(UserError) as caught:
        initialise(model(), path, Rules())
    assert caught.value.key == "init.checkpoint"


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("keys", [ENTRIES, ("state_dict",), tuple(entry for entry in ENTRIES if entry != "meta")])
def test_a_run_cannot_be_resumed_from_it(tmp_path: Path, keys: tuple[str, ...], renamed: bool) -> None:
    tensors = published(tmp_path / "one", *keys, hooks={"ema": EMAHook(momentum=0.1, warmup=False)})
    for path in (tensors, tensors.with_suffix(".pth")):
        resume = path.rename(path.with_stem("mine")) if renamed else path
        error = _refused(tmp_path, resume, load_from=None, resume=resume, max_epochs=2)
        assert error.key == "resume"
        assert error.remedy == f"To start a new run from its weights, use load_from={resume}."
        is_known = resume.suffix == ".pth" and "meta" in keys
        assert ("is published from epoch_1.pth" in error.problem) is is_known


# Which are there. ----------------------------------------------------------------------------------------------------


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").glob("*_published.*")}


def test_published_files_go_with_the_checkpoint_they_were_made_of(tmp_path: Path) -> None:
    def hook() -> CheckpointHook:
        return CheckpointHook(save_best="acc", max_keep_ckpts=1, published_keys=["state_dict"])

    engine_of(tmp_path, {"checkpoint": hook()}, metrics={"acc": Scripted([0.5])}, max_epochs=1).train()
    assert names(tmp_path) == {
        f"{stem}_published.{suffix}" for stem in ("epoch_1", "best_acc_epoch_1") for suffix in ("pth", "safetensors")
    }
    (tmp_path / "checkpoints" / "mine_published.pth").touch()
    resume = tmp_path / "checkpoints" / "best_acc_epoch_1.pth"
    metrics = {"acc": Scripted([0.9])}
    engine_of(tmp_path, {"checkpoint": hook()}, metrics=metrics, max_epochs=2, resume=resume).train()
    assert names(tmp_path) == {"mine_published.pth"} | {
        f"{stem}_published.{suffix}" for stem in ("epoch_2", "best_acc_epoch_2") for suffix in ("pth", "safetensors")
    }
