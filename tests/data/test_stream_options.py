"""Streams by configuration alone: which loader `data.train` gets, and what is refused."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import hydraloop
from hydraloop import build
from hydraloop.config.checks import validate
from hydraloop.data.loaders_from_config import build_loaders
from hydraloop.data.stream_loader import StreamLoader, TrainStreamLoader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import REPOSITORY

STREAMS, TENSORS = "tests.data.streams", "torch.utils.data.TensorDataset"
NUMBERS = f"data.train={{_target_: {STREAMS}.Numbers, samples: 10}}"
INDEXED = f"data.train={{_target_: {STREAMS}.Indexed, samples: 90}}"


@pytest.fixture(autouse=True)
def _trusted() -> None:
    """The parts are built without `hydraloop.build`, which trusts what the config was composed with."""
    ALLOWLIST.trust_folder(REPOSITORY)


def built(*lines: str) -> Loaders:
    cfg = hydraloop.compose(["data=base", *lines], folder=REPOSITORY)
    validate(cfg)
    return build_loaders(cfg, torch.device("cpu"), Distributed())


def refused(*lines: str) -> UserError:
    with pytest.raises(UserError) as caught:
        built(*lines)
    return caught.value


class Sharded(Distributed):
    """As FSDP2."""

    sharded = True


def test_fsdp_is_refused_for_a_stream_to_evaluate() -> None:
    lines = [NUMBERS, "data.val=${data.train}", "data.loader.steps_per_epoch=5", "data.val_loader.steps_per_epoch=2"]
    cfg = hydraloop.compose(["data=base", *lines], folder=REPOSITORY)
    with pytest.raises(UserError, match="FSDP needs the same number on each") as caught:
        build_loaders(cfg, torch.device("cpu"), Sharded())
    assert caught.value.key == "data.val"


def epoch(loaders: Loaders) -> list[Any]:
    train: Any = loaders.train
    return list(train.begin(0, 0))


def test_a_generator_class_is_a_stream() -> None:
    loaders = built(
        NUMBERS,
        "data.val=${data.train}",
        "data.loader.batch_size=4",
        "data.loader.steps_per_epoch=5",
        "data.val_loader.steps_per_epoch=2",
        "data.loader.skip_on_resume=true",
    )
    assert isinstance(loaders.train, TrainStreamLoader)
    assert loaders.train._skip
    assert type(loaders.val) is StreamLoader
    assert (len(loaders.train), len(loaders.val)) == (5, 2)
    assert [len(batch["x"]) for batch in epoch(loaders)] == [4] * 5
    assert [len(batch["x"]) for batch in loaders.val] == [4, 4]


def test_the_steps_of_training_are_not_those_of_an_evaluation() -> None:
    error = refused(NUMBERS, "data.val=${data.train}", "data.loader.steps_per_epoch=5")
    assert (error.key, error.problem) == ("data.val", "Numbers has no length, so the length of an epoch is unknown")
    assert "data.val_loader.steps_per_epoch=1000" in str(error.remedy)


@pytest.mark.parametrize(
    ("lines", "key", "problem"),
    [
        ((NUMBERS,), "data.train", "Numbers has no length"),
        ((INDEXED, "data.loader.steps_per_epoch=5"), "data.loader.steps_per_epoch", "has indices"),
        ((NUMBERS, "data.loader.steps_per_epoch=0"), "data.loader.steps_per_epoch", "0 is below 1"),
        (
            (NUMBERS, "data.loader.steps_per_epoch=5", f"data.loader.sampler={{_target_: {STREAMS}.Sized}}"),
            "data.loader.sampler",
            "data.train is a stream: it has no indices",
        ),
        ((f"data.train={{a: {{_target_: {STREAMS}.Sized}}}}",), "data.train", "nothing to build"),
    ],
)
def test_mistakes_are_found_before_the_first_iteration(lines: tuple[str, ...], key: str, problem: str) -> None:
    error = refused(*lines)
    assert error.key == key
    assert problem in error.problem


def test_a_collate_function_that_fails_in_a_stream_names_the_samples() -> None:
    for workers in (0, 1):
        loaders = built(
            f"data.train={{_target_: {STREAMS}.Odd, at: 5}}",
            "data.loader.steps_per_epoch=9",
            "data.loader.batch_size=4",
            f"data.loader.num_workers={workers}",
        )
        train: Any = loaders.train
        batches = train.begin(0, 0)
        assert next(iter(batches)).tolist() == [[0.0], [1.0], [2.0], [3.0]]
        with pytest.raises(UserError, match=r"default_collate fails for the samples \[4, 5, 6, 7\] of data\.train: "):
            list(islice(chain(batches), 3))
        train.end_workers()


def test_errors_of_a_stream_name_the_section_that_sets_the_option() -> None:
    stream = [f"data.val={{_target_: {STREAMS}.Odd, at: 5}}", "data.val_loader.steps_per_epoch=9"]
    plain = f"data.val={{_target_: {STREAMS}.Plain}}"
    error = refused(plain, "data.val_loader.num_workers=2", "data.val_loader.split_stream=null", *stream[1:])
    assert "data.val_loader.split_stream=true" in str(error.remedy)
    few = [f"data.train={{_target_: {STREAMS}.Shards, lengths: [3]}}", "data.loader.steps_per_epoch=9"]
    train = built(*few, "data.train_loader.num_workers=2")
    with pytest.raises(UserError, match=r"part . of 2 of the stream") as caught:
        epoch(train)
    assert "data.train_loader.num_workers" in str(caught.value.remedy)


def test_the_sanity_step_and_the_validation_read_a_stream_from_its_beginning(tmp_path: Path) -> None:
    points = f"{{_target_: {STREAMS}.Points}}"
    loader = ["data.loader.steps_per_epoch=5", "data.val_loader.steps_per_epoch=3", "data.loader.num_workers=1"]
    lines = ["experiment=spirals", "data=base", "engine.max_epochs=2", "engine.device=cpu", *loader]
    cfg = hydraloop.compose([*lines, f"data.train={points}", f"data.val={points}"], folder=REPOSITORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        engine = build(cfg, run_dir=tmp_path)
        engine.train()
        first = engine.metrics
        assert set(first) >= {"accuracy", "loss"}
        assert engine.validate() == first
