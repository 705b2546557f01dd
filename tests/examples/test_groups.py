"""Parameter groups of models of timm and transformers, by config alone, as a checkpoint contains them."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.projects import REPOSITORY, Project
from tests.examples.test_examples import VISION, environment
from tests.helpers import differences

NO_DECAY = 'optimizer.groups=[{match:"@norm|@bias|@embedding",weight_decay:0}]'
SHORT = ("engine.max_iters=8", "engine.val_interval=null", "engine.limit_test_batches=1")
HALFWAY = ("default_hooks.checkpoint.by_epoch=false", "default_hooks.checkpoint.interval=4")


def copied(name: str, folder: Path, package: str) -> Project:
    if not (find_spec(package) or (VISION / package).exists()):
        pytest.skip(f"{package} is not installed")
    return Project(Path(shutil.copytree(REPOSITORY / "examples" / name, folder / name)))


def settings(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{name of a parameter: its group in the file}."""
    saved = torch.load(checkpoint, weights_only=True)
    groups = zip(saved["meta"]["groups"], saved["optimizer"]["param_groups"], strict=True)
    return {name: group for described, group in groups for name in described["names"]}


@pytest.mark.slow
def test_norms_biases_and_embeddings_of_a_vit_do_not_decay(tmp_path: Path) -> None:
    project = copied("vision", tmp_path, "timm")
    done = project.train(NO_DECAY, "optimizer.weight_decay=0.05", *SHORT, **environment(project))
    assert done.code == 0, done.text
    saved = settings(project.run.path / "checkpoints" / "iter_8.pth")
    decayed = {name for name, group in saved.items() if group["weight_decay"] == 0.05}
    assert {name for name, group in saved.items() if group["weight_decay"] == 0} == saved.keys() - decayed
    block = r"blocks\.[01]\.(attn\.(qkv|proj)|mlp\.fc[12])"
    assert len(decayed) == 10
    assert all(re.fullmatch(rf"(patch_embed\.proj|{block}|head)\.weight", name) for name in decayed)
    (decays,) = re.findall(r"0: 10 tensors .*, lr 0\.003, weight_decay 0\.05\n", done.out)
    assert decays
    (kept,) = re.findall(r"1: (\d+) tensors .*, lr 0\.003, weight_decay 0\n", done.out)
    assert int(kept) == len(saved) - 10


@pytest.mark.nightly
def test_the_lr_of_a_bert_decays_from_layer_to_layer_on_two_ranks_and_after_a_resume(tmp_path: Path) -> None:
    """With bf16, accumulation and an average of the weights."""
    project = copied("text", tmp_path, "transformers")
    options = ("optimizer.layer_decay=0.75", NO_DECAY, "hooks=[ema]", "engine.accumulate=2", *SHORT, *HALFWAY)
    options += ("distributed.nproc_per_node=2", "scheduler.linear.end=4")
    done = project.train(*options)
    assert done.code == 0, done.text
    file = project.run.path / "checkpoints" / "iter_8.pth"
    uninterrupted = torch.load(file, weights_only=True)
    file.unlink()
    done = project.train(*options, f"resume={file.with_name('iter_4.pth')}")
    assert done.code == 0, done.text
    resumed = torch.load(file, weights_only=True)
    for part in ("state_dict", "optimizer", "schedulers"):
        assert not list(differences(resumed[part], uninterrupted[part])), part

    halfway = settings(file.with_name("iter_4.pth"))
    depths = {"bert.embeddings": 3, "bert.encoder.layer.0": 2, "bert.encoder.layer.1": 1, "bert.pooler": 0}
    lr = halfway["classifier.weight"]["lr"]
    assert 0 < lr < 2e-3  # the schedules scale all groups
    for name, group in halfway.items():
        depth = next((depth for module, depth in depths.items() if name.startswith(f"{module}.")), 0)
        assert group["initial_lr"] == pytest.approx(2e-3 * 0.75**depth)
        assert group["lr"] == pytest.approx(lr * 0.75**depth)
        no_decay = "LayerNorm" in name or name.endswith("bias") or "embeddings" in name
        assert group["weight_decay"] == (0 if no_decay else 0.01), name
