"""What cannot be launched is refused, with the key."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from hydraloop import UserError
from hydraloop.launch.checks import check, check_single_run
from hydraloop.schemas.distributed import DistributedConf

RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def mistake(device: str = "cpu", **options: object) -> UserError:
    cfg = OmegaConf.create(
        {"distributed": OmegaConf.structured(DistributedConf(**options)), "engine": {"device": device}}
    )  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        check(cfg)
    assert caught.value.remedy
    return caught.value


def fine(device: str = "cpu", **options: object) -> None:
    check(
        OmegaConf.create(
            {"distributed": OmegaConf.structured(DistributedConf(**options)), "engine": {"device": device}}
        )
    )  # type: ignore[arg-type]


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 of two of torchrun's."""
    for name, value in {**RANK_0_OF_2, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)


def test_what_works() -> None:
    fine()
    fine(nproc_per_node=2)
    fine(nproc_per_node=64, strategy="fsdp2", backend="gloo")
    fine(nproc_per_node=2, strategy="ddp", backend="cpu:gloo,cuda:nccl")
    check_single_run()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("backend", "glo"),
        ("backend", "nccl"),
    ],
)
def test_values(option: str, value: object) -> None:
    error = mistake(**{"nproc_per_node": 2, option: value})
    assert error.key == f"distributed.{option}"
    assert str(value) in error.problem


def test_a_strategy_for_several_processes_with_one() -> None:
    assert mistake(strategy="fsdp2").remedy == (
        "Use auto, or start several: distributed.nproc_per_node=2, or torchrun."
    )


def test_a_device_with_a_number_for_several_processes() -> None:
    error = mistake("cuda:1", nproc_per_node=2)
    assert error.key == "engine.device"
    assert "2 processes would share cuda:1" in error.problem


def test_more_processes_than_gpus() -> None:
    count = torch.cuda.device_count()
    error = mistake("cuda", nproc_per_node=count + 2)
    if count:
        assert error.key == "distributed.nproc_per_node"
        assert f"{count + 2} processes would share {count} GPU" in error.problem
    else:
        assert error.problem.startswith("this machine has no cuda")


@pytest.mark.usefixtures("torchrun")
def test_under_torchrun_its_numbers_count() -> None:
    fine()
    fine(nproc_per_node=2, strategy="fsdp2")
    assert "torchrun has started 2 processes on this machine, not 3" in mistake(nproc_per_node=3).problem
    assert "--max-restarts=1" in str(mistake(max_restarts=1).remedy)
    with pytest.raises(UserError) as caught:
        check_single_run()
    assert "python train.py -m … distributed.nproc_per_node=2" in str(caught.value)
