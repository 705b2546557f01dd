"""GPUs and threads of the jobs: each GPU is handed out once, and wrong numbers are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import UserError
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps.executors.gpus import Shares, Slots, shares, visible


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with these GPUs. The driver's program is replaced, because test machines have none."""
    uuids = ["GPU-aa", "GPU-ab", "GPU-cc", "GPU-dd"]
    lines = [f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: {uuid})" for number, uuid in enumerate(uuids)]
    lines.insert(1, "  MIG 1g.10gb     Device  0: (UUID: MIG-ee)")
    program = tmp_path / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", '[ "$*" = -L ] && cat << END', *lines, "END\n"]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return uuids


def divided(*, ranks: int = 1, device: str = "auto", **sweep: Any) -> Shares:
    return shares(OmegaConf.merge(OmegaConf.structured(SweepConf), sweep), ranks=ranks, device=device)


def test_each_gpu_has_one_job() -> None:
    slots = Slots(["3", "GPU-aa"], 1)
    assert slots.most == 2
    assert (slots.take(0), slots.take(1), slots.take(2)) == (("3",), ("GPU-aa",), None)
    slots.give(0)
    slots.give(0)
    assert (slots.take(2), slots.take(3)) == (("3",), None)


def test_jobs_share_gpus_or_use_several() -> None:
    halves = Slots(["0", "1"], 0.5)
    assert halves.most == 4
    assert [halves.take(number) for number in range(5)] == [("0",), ("1",), ("0",), ("1",), None]
    pairs = Slots(["0", "1", "2", "3", "4"], 2)
    assert pairs.most == 2
    assert [pairs.take(number) for number in range(3)] == [("0", "1"), ("2", "3"), None]
    assert Slots(["0"], 0.3).most == 3


@pytest.mark.parametrize("per_job", [0, -1, 1.5, 3])
def test_an_impossible_share_is_refused(per_job: float) -> None:
    with pytest.raises(UserError, match=r"sweep\.gpus_per_job"):
        Slots(["0", "1"], per_job)


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (None, ["GPU-aa", "GPU-ab", "GPU-cc", "GPU-dd"]),
        ("", []),
        ("2, 1, 4, 0", ["2", "1"]),
        ("GPU-ab,MIG-1/2", ["GPU-ab", "MIG-1/2"]),
    ],
)
def test_the_variable_for_visible_gpus_counts(
    machine: list[str], monkeypatch: pytest.MonkeyPatch, variable: str | None, found: list[str]
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible() == found


@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_driver_there_are_no_gpus(
    is_there: bool, machine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").unlink()
    if is_there:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no driver; exit 9\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible() == []
    assert divided() == Shares(1)
    with pytest.raises(UserError, match=r"sweep\.gpus_per_job: 2 is .* of this sweep \(0\)"):
        divided(gpus_per_job=2)


def test_one_job_for_each_gpu_and_equal_threads(machine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    found = divided()
    assert (found.workers, found.threads) == (4, 4)
    assert divided(max_workers=5).workers == 4
    found = divided(gpus=[1, 3], max_workers=1)
    assert (found.workers, found.threads) == (1, None)
    assert found.slots is not None
    assert found.slots.take(0) == ("1",)
    assert divided(gpus_per_job=2, ranks=2).threads == 4
    assert divided(device="cpu", max_workers=3) == Shares(3, None, 5)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert divided().threads is None


def test_slurm_decides_what_runs() -> None:
    assert divided(executor="submitit") == Shares(32)
    assert divided(executor="submitit", max_workers=500) == Shares(500)


def test_the_numbers_of_gpus_are_those_of_torch(machine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    found = divided(gpus=[1])
    assert found.slots is not None
    assert found.slots.take(0) == ("1",)
    with pytest.raises(UserError, match=r"GPU 2 does not exist: 2 found"):
        divided(gpus=[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": [0, 4]}, "sweep.gpus: GPU 4 does not exist: 4 found"),
        ({"gpus": [-1]}, "sweep.gpus: GPU -1 does not exist"),
        ({"ranks": 2}, r"distributed.nproc_per_node: the 2 ranks of a job need 2 GPUs, and it has 1\n"),
        ({"executor": "submitit", "gpus": [0]}, "sweep.gpus: Slurm chooses"),
        ({"executor": "ray", "gpus_per_job": 2}, "sweep.gpus: Ray chooses"),
        ({"device": "cpu", "gpus_per_job": 2}, "sweep.gpus_per_job: 2 is"),
    ],
)
def test_what_the_machine_does_not_have_is_refused(machine: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        divided(**options)
