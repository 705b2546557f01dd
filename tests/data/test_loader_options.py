"""`data.loader` and `data.<split>_loader`: functions, objects and numbers, by configuration alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, RandomSampler

import hydraloop
from hydraloop.config.checks import validate
from hydraloop.data.loaders_from_config import build_loaders
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import REPOSITORY
from tests.data import loader_parts

PARTS = "tests.data.loader_parts"


@pytest.fixture(autouse=True)
def _trusted() -> None:
    """The parts are built without `hydraloop.build`, which trusts what the config was composed with."""
    ALLOWLIST.trust_folder(REPOSITORY)


def composed(*lines: str, base: bool = True) -> DictConfig:
    """The config of a run on 40 lists of numbers."""
    data = [f"data.{split}={{_target_: {PARTS}.Words}}" for split in ("train", "val", "test")]
    data = [line for line in data if not any(own.startswith(line.split("=")[0] + "=") for own in lines)]
    cfg = hydraloop.compose(["data=base", *data, *(lines if base else ())], folder=REPOSITORY)
    if not base:
        own = OmegaConf.from_dotlist([*data, *lines])
        OmegaConf.update(cfg, "data", own.data, merge=False)
    return cfg


def loaders(*lines: str, base: bool = True) -> dict[str, GlobalBatchLoader]:
    cfg = composed(*lines, base=base)
    validate(cfg)
    built: Any = build_loaders(cfg, torch.device("cpu"), Distributed())
    return {split: getattr(built, split) for split in ("train", "val", "test")}


@pytest.mark.parametrize("base", [True, False])
def test_functions_become_partials_and_classes_are_created(base: bool) -> None:
    built = loaders(
        f"data.loader.collate_fn={{_target_: {PARTS}.pad, value: 7}}",
        f"data.val_loader.collate_fn={{_target_: {PARTS}.Pad, value: 8}}",
        "data.train_loader.batch_size=5",
        "data.loader.eval_batch_size=4",
        "data.test_loader.batch_size=3",
        base=base,
    )
    train, val, test = built.values()
    assert isinstance(train.collate_fn.stack, partial)  # type: ignore[attr-defined]
    assert isinstance(val.collate_fn.stack, loader_parts.Pad)  # type: ignore[attr-defined]
    assert [next(iter(loader)).shape[0] for loader in (train, val, test)] == [5, 4, 3]
    assert next(iter(val)).tolist() == [[0, 8, 8, 8], [1, 1, 8, 8], [2, 2, 2, 8], [3, 3, 3, 3]]
    assert next(iter(test)).tolist() == [[0, 7, 7], [1, 1, 7], [2, 2, 2]]


def test_what_defines_an_epoch_of_training_is_not_for_evaluation() -> None:
    sampler = "{_target_: torch.utils.data.RandomSampler, _partial_: true, num_samples: 6}"
    train, val, test = loaders(
        f"data.loader.sampler={sampler}",
        "data.loader.drop_last=true",
        "data.loader.batch_size=4",
        f"data.test_loader.sampler={{_target_: {PARTS}.every_second, _partial_: true}}",
        f"data.loader.collate_fn={{_target_: {PARTS}.pad}}",
    ).values()
    assert (len(train), len(val), len(test)) == (1, 10, 5)
    assert isinstance(train.order._custom.sampler, RandomSampler)  # type: ignore[attr-defined]
    drawn = [int(row[0]) for batch in test for row in batch]
    assert sorted(drawn) == list(range(0, 40, 2)) != drawn
    assert drawn == [int(row[0]) for batch in test for row in batch], "an evaluation has the same order each time"


def test_worker_options() -> None:
    (train, *_) = loaders(
        f"data.loader.worker_init_fn={{_target_: {PARTS}.count_workers}}",
        "data.loader.multiprocessing_context=spawn",
        "data.train_loader.num_workers=1",
    ).values()
    assert train._torch.worker_init_fn.init.func is loader_parts.count_workers  # type: ignore[union-attr]
    assert train._torch.multiprocessing_context.get_start_method() == "spawn"  # type: ignore[union-attr]
    assert loaders("data.loader.multiprocessing_context=spawn")["train"]._torch.multiprocessing_context is None


def test_data_may_be_a_loader_a_list_or_any_sized_iterable_of_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hydraloop.data")
    ready = f"{{_target_: torch.utils.data.DataLoader, dataset: {{_target_: {PARTS}.words}}, shuffle: true}}"
    cfg = composed(
        f"data.train={ready}", f"data.val={{_target_: {PARTS}.words}}", f"data.test={{_target_: {PARTS}.Epoch}}"
    )
    built: Any = build_loaders(cfg, torch.device("cpu"), Distributed())
    assert isinstance(built.train, DataLoader)
    assert not isinstance(built.train, GlobalBatchLoader)
    assert isinstance(built.val, GlobalBatchLoader)
    assert len(built.val.dataset) == 40
    assert isinstance(built.test, loader_parts.Epoch)
    (message,) = caplog.messages
    assert message.startswith("data.test: Epoch has a length and no __getitem__, so it yields batches")


class _OfTwo(Distributed):
    world_size = 2


@pytest.mark.parametrize(
    ("target", "ranks", "text"),
    [
        ("Epoch", 2, "yields the same batches on each of 2 processes"),
        ("pad", 1, "pad"),
    ],
)
def test_objects_of_another_type_than_data_are_refused(target: str, ranks: int, text: str) -> None:
    cfg = composed(f"data.train={{_target_: {PARTS}.{target}}}")
    with pytest.raises(UserError, match=text) as caught:
        build_loaders(cfg, torch.device("cpu"), _OfTwo() if ranks == 2 else Distributed())
    assert caught.value.key == "data.train"


def test_a_weighted_sampler_by_config_alone() -> None:
    weights = [0.0] * 20 + [1.0] * 20
    sampler = f"{{_target_: torch.utils.data.WeightedRandomSampler, weights: {weights}, num_samples: 30}}"
    train = loaders(f"data.loader.sampler={sampler}", f"data.loader.collate_fn={{_target_: {PARTS}.pad}}")["train"]
    epochs = []
    for epoch in (0, 1, 0):
        train.set_epoch(epoch)
        epochs.append([int(row[0]) for batch in train for row in batch])
    assert epochs[0] == epochs[2] != epochs[1]
    assert len(epochs[0]) == 30
    assert min(epochs[0]) >= 20
