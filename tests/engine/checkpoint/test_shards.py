"""Checkpoints of FSDP2: each rank writes a file, and any number of ranks reads them."""

from __future__ import annotations

import logging
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.checkpoint.format import load, peek
from hydraloop.engine.checkpoint.shards import join, split
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import is_sharded, whole
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.files.checkpoint_files import newest_intact, remove
from hydraloop.files.integrity import damage, shards_of
from hydraloop.hooks import EMAHook
from hydraloop.hooks.checkpoint_copies import publish
from hydraloop.hooks.checkpoint_folder import CheckpointFolder
from hydraloop.tasks import Regression
from hydraloop.tracking.run_description import checkpoints
from tests.helpers import make_engine
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow


def engine_of(distributed: Distributed, run_dir: Path, resume: Path | None = None) -> Engine:
    """Rows that no number of ranks divides, strides of its own, and averages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 3, 1)), nn.Conv2d(1, 5, 1), nn.Flatten(), nn.Linear(15, 1))
    model = model.to(memory_format=torch.channels_last)
    task = Regression(model, nn.MSELoss())
    distributed.prepare(model)
    return make_engine(
        run_dir,
        {"ema": EMAHook()},
        train=[(torch.ones(2, 3), torch.zeros(2, 1))] * 2,
        task=task,
        optimizer=torch.optim.AdamW(task.parameters(), lr=0.01),
        distributed=distributed,
        resume=resume,
    )


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def saves(distributed: Distributed, run_dir: str) -> tuple[list[bool], list[str], list[dict[str, Any]]]:
    """Save four files, the second twice, the third on a full disk of rank 1. Rank 0 cannot write the fourth."""
    engine, folder = engine_of(distributed, Path(run_dir)), Path(run_dir)
    engine.train()
    found, expected = [], []
    for number, asynchronous in ((1, False), (2, True), (2, True)):
        expected.append({name: whole(value).clone() for name, value in engine.model.state_dict().items()})
        engine.checkpoints.save(folder / f"epoch_{number}.pth", asynchronous=asynchronous, resume_from_it=True)
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(2)
        found.append(engine.checkpoints.wait_for_save())
    logging.getLogger("hydraloop").addHandler(handler := _Lines())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if distributed.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        engine.checkpoints.save(folder / "epoch_3.pth", asynchronous=True)
        found.append(engine.checkpoints.wait_for_save())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logging.getLogger("hydraloop").removeHandler(handler)
    (folder / "linked" / "epoch_4.pth" / "in the way").mkdir(parents=True, exist_ok=True)
    found.append(engine.checkpoints.save(folder / "linked" / "epoch_4.pth"))
    engine.checkpoints.save(folder / "linked" / "one.pth", links=[folder / "linked" / "two.pth"])
    return found, handler.lines, expected


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder that two ranks have written to, and what they told."""
    folder = tmp_path_factory.mktemp("shards")
    return folder, on_ranks(2, saves, str(folder), strategy="fsdp2")


@pytest.fixture
def folder(written: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_each_rank_writes_a_file_and_a_full_disk_of_one_is_a_warning_on_all(written: tuple[Path, Any]) -> None:
    folder, told = written
    for done, lines, _ in told:
        assert done == [True, True, True, False, False]
        assert len(lines) == 1
        assert "epoch_3.pth could not be written: File too large; the last checkpoint is" in lines[0]
        assert "epoch_2.pth. Training continues, and the next save is tried." in lines[0]
    assert sorted(path.name.rpartition("-")[0] for path in folder.glob("*.shards-*")) == [
        "epoch_1.shards",
        "epoch_2.shards",
    ]
    assert [path.name for path in (folder / "linked").glob("epoch*")] == ["epoch_4.pth"], "no shards fill the disk"
    for number in (1, 2):
        found = shards_of(folder / f"epoch_{number}.pth")
        assert found is not None
        assert [path.suffix for path in found.folder.iterdir()] == [".safetensors"] * 2
        assert len(found.files) == 2
    assert not [path.name for path in folder.glob(".*")]


def test_a_link_has_shards_of_its_own_that_share_the_disk(folder: Path, written: tuple[Path, Any]) -> None:
    one, two = (shards_of(written[0] / "linked" / f"{name}.pth") for name in ("one", "two"))
    assert one is not None
    assert two is not None
    assert all((one.folder / name).samefile(two.folder / name) for name in one.files)
    weights = load(folder / "linked" / "one.pth")["state_dict"]
    remove(folder / "linked" / "one.pth")
    assert [path.name for path in (folder / "linked").glob("one*")] == []
    assert load(folder / "linked" / "two.pth")["state_dict"]["1.weight"].equal(weights["1.weight"])


def test_without_ranks_the_tensors_are_whole(written: tuple[Path, Any]) -> None:
    folder, told = written
    for name, number in (("epoch_1.pth", 0), ("epoch_2.pth", 2)):
        saved = load(folder / name)
        assert "shards" not in saved
        assert {key: value.tolist() for key, value in saved["state_dict"].items()} == {
            key: value.tolist() for key, value in told[0][2][number].items()
        }
        weight = saved["optimizer"]["state"][0]["exp_avg"]
        assert weight.shape == (5, 1, 1, 1)
        assert weight.any()
        assert saved["hooks"]["ema"]["averaged"]["3.weight"].shape == (1, 15)
    assert peek(folder / "epoch_1.pth", key="resume") is not None
    some = load(folder / "epoch_1.pth", only=["state_dict"])
    assert isinstance(some["state_dict"]["3.bias"], Tensor)
    assert some["optimizer"]["state"][0]["exp_avg"] == {"__shard__": "optimizer/state/0/exp_avg"}
    files = publish(folder / "epoch_1.pth", ["state_dict"], "raw")
    assert [shards_of(file) for file in files[:1]] == [None]
    assert load(files[0])["state_dict"].keys() == saved["state_dict"].keys()
    for file in files:
        file.unlink()


def parts_of(distributed: Distributed, path: str) -> tuple[list[float], list[float], list[float], int]:
    """Load the parts of this rank, and the whole tensors; then resume from them."""
    saved = load(Path(path), ranks=distributed)
    assert is_sharded(saved["state_dict"]["1.weight"])
    rows = saved["state_dict"]["1.weight"].to_local()
    engine = engine_of(distributed, Path(path).parent, Path(path))
    engine.train()
    weight = whole(engine.model.state_dict()["1.weight"])
    average = whole(engine.optimizer.state_dict()["state"][0]["exp_avg"])
    return rows.flatten().tolist(), weight.flatten().tolist(), average.flatten().tolist(), len(rows)


def test_another_number_of_ranks_reads_its_parts(folder: Path) -> None:
    path = folder / "epoch_1.pth"
    saved = load(path)
    expected = saved["state_dict"]["1.weight"].flatten().tolist()
    told = on_ranks(3, parts_of, str(path), strategy="fsdp2")
    assert [rows for _, _, _, rows in told] == [2, 2, 1]
    assert [value for rows, *_ in told for value in rows] == expected
    for _, weight, average, _ in told:
        assert weight == expected
        assert average == saved["optimizer"]["state"][0]["exp_avg"].flatten().tolist()


def test_damaged_and_missing_shards_are_reported_and_the_checkpoint_before_is_used(folder: Path) -> None:
    path = folder / "epoch_2.pth"
    found = shards_of(path)
    assert found is not None
    shard = sorted(found.folder.iterdir())[1]
    content = shard.read_bytes()
    assert newest_intact(folder) == path
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert damage(path) == f"wrong size or checksum of {found.folder.name}/{shard.name}"
    assert [damage(path, rank, 2) for rank in range(2)] == [None, damage(path)], "each rank verifies its own shard"
    with pytest.raises(
        UserError, match=r"epoch_2\.pth is damaged: wrong size or checksum of epoch_2\.shards-"
    ) as caught:
        load(path)
    assert caught.value.remedy == f"Use the checkpoint before it: resume={folder / 'epoch_1.pth'}"
    assert newest_intact(folder) == folder / "epoch_1.pth"
    shard.unlink()
    with pytest.raises(UserError, match=r"shard-00002-\S+ is missing"):
        load(path, only=())
    shard.write_bytes(content)
    shutil.copy(shard, shard.with_name("more.safetensors"))
    assert damage(path) == f"{found.folder.name}/more.safetensors is not part of it"
    shutil.rmtree(found.folder)
    with pytest.raises(UserError, match="is missing"):
        load(path)


def test_deleting_a_checkpoint_deletes_its_shards_and_a_start_those_without_a_file(folder: Path) -> None:
    (folder / "epoch_1.shards-00000000").mkdir()
    (folder / "iter_7.shards-00000000").mkdir()
    kept = {found.folder for number in (1, 2) if (found := shards_of(folder / f"epoch_{number}.pth")) is not None}
    shutil.rmtree(folder / "linked")
    CheckpointFolder(folder).remove_unfinished()
    assert {path for path in folder.iterdir() if path.is_dir()} == kept
    remove(folder / "epoch_1.pth")
    assert [path.name.rpartition("-")[0] for path in folder.iterdir() if path.is_dir()] == ["epoch_2.shards"]


def test_trackers_do_not_send_files_without_their_shards(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt = SimpleNamespace(params={"default_hooks.checkpoint.out_dir": str(folder)})
    run: Any = SimpleNamespace(run_dir=folder, attempt=attempt)
    torch.save({}, folder / "whole.pth")
    assert checkpoints(run, "all", None, ended=False) == [folder / "whole.pth"]
    assert checkpoints(run, "best", str(folder / "epoch_1.pth"), ended=True) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"run `python train.py export {folder} format=safetensors`" in line


def test_values_that_are_not_sharded_stay_as_they_are() -> None:
    parts: Any = {}
    value = {"a": [torch.ones(2), (1, {"b": "c"})], 3: None}
    assert split(value, parts) == value
    assert not parts
    assert join(value, {}.get) == value
