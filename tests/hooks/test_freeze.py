"""FreezeHook: what is trained and when, on one and two ranks, with DDP and FSDP2, resumed at every checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.precision import make_precision
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, EMAHook, FreezeHook, GradClipHook
from tests.helpers import differences
from tests.hooks.tiny_runs import Stopper, batches, engine_of, model
from tests.marks import nightly, slow
from tests.ranks import on_ranks

State = dict[str, Tensor]
FROZEN = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")


class Watcher(Hook):
    """The whole state after each optimizer step."""

    priority = 45

    def __init__(self) -> None:
        self.states: list[State] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.stepper.stepped:
            self.states.append(_whole(engine))


def _whole(engine: Engine) -> State:
    return {name: whole(value).detach().clone() for name, value in engine.model.state_dict().items()}


def network(norm: bool) -> nn.Sequential:
    """Three or four layers; always the same initial weights."""
    net = model()
    return net if norm else nn.Sequential(net[0], nn.Identity(), net[2], net[3])


def train(
    distributed: Distributed,
    run_dir: str,
    freeze: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Three epochs of four global batches, two for each step. Return the states after each step, and the averages.

    Args:
        options: `resume` (a file), `norm` (with a batch norm, by default), `fail_at` (an iteration), `precision`.
    """
    net, resume = network(options.get("norm", True)), options.get("resume")
    distributed.prepare(net)
    mine = [
        (inputs[distributed.rank :: distributed.world_size], targets[distributed.rank :: distributed.world_size])
        for inputs, targets in batches()
    ]
    watcher, ema = Watcher(), EMAHook(momentum=0.3, warmup=False)
    engine = engine_of(
        Path(run_dir),
        {
            "freeze": FreezeHook(**freeze),
            "clip": GradClipHook(max_norm=1.0),
            "watcher": watcher,
            "ema": ema,
            "saving": CheckpointHook(by_epoch=False, interval=2),
            "stopper": Stopper(fail_at=options.get("fail_at", 0)),
        },
        net=net,
        train=mine,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1),
        distributed=distributed,
        precision=make_precision({"name": options.get("precision", "fp32")}, torch.device("cpu")),
        accumulate=2,
        resume=None if resume is None else Path(resume),
    )
    try:
        engine.train()
    except FloatingPointError:
        return {}
    averages = {name: whole(value).clone() for name, value in ema.state_dict()["averaged"].items()}
    return {"states": watcher.states, "averages": averages, "held": len(engine.optimizer.param_groups[0]["params"])}


def trained(ranks: int, *args: Any, strategy: str = "ddp", **options: Any) -> list[dict[str, Any]]:
    """Call `train` on each rank."""
    if ranks == 1:
        return [train(Distributed(), *args, options)]
    return list(on_ranks(ranks, train, *args, options, strategy=strategy))


def unchanged(states: list[State], names: tuple[str, ...] = FROZEN) -> list[bool]:
    """For each step, whether these entries are as at the start."""
    start = model().state_dict()
    return [all(torch.equal(state[name], start[name]) for name in names) for state in states]


# What is trained, and when. ------------------------------------------------------------------------------------------

T, F = True, False


@pytest.mark.parametrize(
    ("ranks", "strategy", "options", "expected"),
    [
        (1, "", {"epochs": 1}, [T, T, F, F, F, F]),
        (1, "", {"iters": 3}, [T, T, F, F, F, F]),  # until the window ends
        (1, "", {"iters": 6}, [T, T, T, F, F, F]),  # inside an epoch
        (1, "", {}, [T] * 6),
        (2, "ddp", {"iters": 3}, [T, T, F, F, F, F]),
        (2, "fsdp2", {"iters": 3}, [T, T, F, F, F, F]),
    ],
)
def test_modules_are_frozen_for_their_time(
    ranks: int, strategy: str, options: dict[str, Any], expected: list[bool], tmp_path: Path
) -> None:
    for one in trained(ranks, str(tmp_path), {"modules": ["0", "1"], **options}, strategy=strategy):
        assert unchanged(one["states"]) == expected, "neither steps, nor decay, nor statistics"
        assert not any(unchanged(one["states"], ("3.weight", "3.bias")))
        assert one["held"] == 6, "the optimizer has them from the start"


@pytest.mark.parametrize(
    ("strategy", "end", "precision"),
    [
        ("ddp", {"epochs": 1}, "fp32"),
        ("fsdp2", {"iters": 6}, "fp32"),
        ("fsdp2", {"epochs": 1}, "bf16"),
    ],
)
def test_two_ranks_train_as_one_process_does(
    strategy: str, end: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    freeze, tolerance = {"modules": ["0"], **end}, 1e-5 if precision == "fp32" else 2e-2
    (expected,) = trained(1, str(tmp_path / "one"), freeze, norm=False, precision=precision)
    for found in trained(2, str(tmp_path / "two"), freeze, norm=False, precision=precision, strategy=strategy):
        for part in ("states", "averages"):
            torch.testing.assert_close(found[part], expected[part], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("end", "ranks", "strategy"),
    [
        *(({"epochs": 1}, 1, ""), ({"iters": 5}, 1, ""), ({}, 1, "")),
        slow({"epochs": 1}, 2, "ddp"),
        slow({"iters": 5}, 2, "fsdp2"),
        nightly({"iters": 5}, 2, "ddp"),
        nightly({"epochs": 1}, 2, "fsdp2"),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(end: dict[str, Any], ranks: int, strategy: str, tmp_path: Path) -> None:
    freeze = {"modules": ["0", "1"], **end}
    expected = trained(ranks, str(tmp_path / "whole"), freeze, strategy=strategy)
    for fail_at in (3, 5, 7, 9):  # in the frozen time, at its end, and after it
        folder = tmp_path / str(fail_at)
        trained(ranks, str(folder), freeze, fail_at=fail_at, strategy=strategy)
        saved = str(folder / "checkpoints" / f"iter_{fail_at - 1}.pth")
        resumed = trained(ranks, str(tmp_path / f"resumed_{fail_at}"), freeze, resume=saved, strategy=strategy)
        for found, whole_run in zip(resumed, expected, strict=True):
            assert len(found["states"]) == 6 - (fail_at - 1) // 2
            parameters = list(found["averages"])
            assert list(differences(found["averages"], whole_run["averages"])) == []
            for mine, theirs in zip(found["states"], whole_run["states"][(fail_at - 1) // 2 :], strict=True):
                assert [name for name in parameters if not torch.equal(mine[name], theirs[name])] == []
        last = [one[0]["states"][-1] for one in (resumed, expected)]
        assert list(differences(*last)) == [], "with the statistics, which checkpoints have from rank 0"


# Modes. --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_eval", [True, False])
def test_frozen_norms_keep_their_statistics_unless_told_otherwise(tmp_path: Path, norm_eval: bool) -> None:
    freeze = {"modules": ["0", "1"], "norm_eval": norm_eval, "epochs": 1}
    (one,) = trained(1, str(tmp_path), freeze)
    assert unchanged(one["states"], ("1.running_mean",))[:2] == [norm_eval] * 2
    assert unchanged(one["states"], ("1.weight",))[:2] == [True] * 2
    assert unchanged(one["states"], ("1.running_mean",))[2:] == [False] * 4


def test_a_norm_that_was_in_eval_mode_stays_in_it(tmp_path: Path) -> None:
    net = model()
    net[1].eval()
    engine_of(tmp_path, {"freeze": FreezeHook(modules=["0", "1"], epochs=1)}, net=net).train()
    assert not net[1].training
    assert net[0].training


# Tied weights, and several of these hooks. ---------------------------------------------------------------------------


@pytest.mark.parametrize("modules", [["head"], ["embed"]])
def test_a_tied_weight_is_frozen_by_each_of_its_names(tmp_path: Path, modules: list[str]) -> None:
    net = nn.Sequential()
    net.add_module("embed", nn.Linear(3, 3))
    net.add_module("head", nn.Linear(3, 3))
    net.add_module("out", nn.Linear(3, 2))
    net.head.weight = net.embed.weight
    weight = net.head.weight.detach().clone()
    engine_of(tmp_path, {"freeze": FreezeHook(modules=modules)}, net=net).train()
    assert torch.equal(net.head.weight, weight)
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed.weight", f"{modules[0]}.bias"}


# Mistakes. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (None, "no module is named\n  Name some: hooks.freeze.modules="),
        (["backbon.*"], "'backbon.*' matches no name\n  Did you mean backbone"),
        (["backbone", "x"], "'x' matches no name\n  The names are backbone, backbone.0, "),
        (["re:("], "'re:(' is not a regular expression"),
        (["*"], "all of the 4 trained parameters are in these modules\n  Name other modules, such as backbone."),
        (["backbone.1"], "none of the 4 trained parameters are in these modules"),
    ],
)
def test_a_pattern_that_does_not_fit_is_one_message(tmp_path: Path, modules: list[str] | None, words: str) -> None:
    net = nn.Sequential()
    net.add_module("backbone", nn.Sequential(nn.Linear(3, 5), nn.Tanh()))
    net.add_module("head", nn.Linear(5, 2))
    engine = engine_of(tmp_path, {"freeze": FreezeHook(modules=modules)}, net=net)
    with pytest.raises(UserError) as caught:
        engine.train()
    assert str(caught.value).startswith(f"hooks.freeze.modules: {words}")
    assert engine.progress.iteration == 0


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["0"], {"0.weight", "0.bias"}),
        (["re:[01]"], {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (["0.*", "3.weight"], {"0.weight", "0.bias", "3.weight"}),
    ],
)
def test_patterns_name_modules_or_parameters(
    tmp_path: Path, modules: list[str], expected: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    net = model()
    engine_of(tmp_path, {"freeze": FreezeHook(modules=modules)}, net=net).train()
    assert {name for name, parameter in net.named_parameters() if not parameter.requires_grad} == expected
    assert f"hooks.freeze: froze {len(expected)} parameters" in caplog.text
