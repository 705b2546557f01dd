"""A config that cannot be launched is refused; the error names the key."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from hydraloop import UserError
from hydraloop.launch.torchrun import check_options, check_single_run
from hydraloop.schemas.engine import DistributedConf

RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def config(device: str = "cpu", **options: object) -> DictConfig:
    distributed = OmegaConf.structured(DistributedConf(**options))  # type: ignore[arg-type]
    return OmegaConf.create({"distributed": distributed, "engine": {"device": device}})


def mistake(device: str = "cpu", **options: object) -> UserError:
    with pytest.raises(UserError) as caught:
        check_options(config(device, **options))
    assert caught.value.remedy
    return caught.value


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of two ranks of torchrun."""
    for name, value in {**RANK_0_OF_2, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)


def test_valid_options() -> None:
    check_options(config())
    check_options(config(nproc_per_node=2))
    check_options(config(nproc_per_node=64, strategy="fsdp2", backend="gloo"))
    check_options(config(nproc_per_node=2, strategy="ddp", backend="cpu:gloo,cuda:nccl"))
    check_single_run()


def test_a_strategy_for_several_processes_with_one() -> None:
    assert mistake(strategy="fsdp2").remedy == (
        "Use auto, or start several: distributed.nproc_per_node=2, or torchrun."
    )


@pytest.mark.usefixtures("torchrun")
def test_torchrun_decides_the_numbers() -> None:
    check_options(config())
    check_options(config(nproc_per_node=2, strategy="fsdp2"))
    assert mistake(nproc_per_node=3).remedy == "Give it to torchrun: --nproc-per-node=3"
    assert mistake(max_restarts=1).remedy == "Give it to torchrun: --max-restarts=1"
    with pytest.raises(UserError) as caught:
        check_single_run()
    assert "python train.py -m … distributed.nproc_per_node=2" in str(caught.value)
