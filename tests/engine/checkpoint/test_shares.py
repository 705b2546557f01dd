"""Several ranks verify a checkpoint together: each reads its share, and all raise the error of one."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.checkpoint.format import load, write
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.files import integrity
from hydraloop.files.integrity import damage
from tests.ranks import on_ranks

WEIGHTS = {str(number): torch.full((4000,), float(number + 1)) for number in range(10)}


def put(folder: Path, *wrong: int) -> Path:
    """A checkpoint with a flipped bit in these weights."""
    path = folder / "epoch_2.pth"
    write(path, {"state_dict": WEIGHTS})
    content = bytearray(path.read_bytes())
    for number in wrong:
        content[content.index(WEIGHTS[str(number)].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("ranks", [2, 3, 64])
@pytest.mark.parametrize("wrong", [0, 5, 9])
def test_exactly_one_rank_finds_each_wrong_bit(ranks: int, wrong: int, tmp_path: Path) -> None:
    path = put(tmp_path, wrong)
    found = [what for rank in range(ranks) if (what := damage(path, rank, ranks)) is not None]
    assert found == [damage(path)]
    assert "wrong checksum of " in found[0]


def test_a_rank_reads_only_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    original = zipfile.ZipFile.open

    def noted(self: Any, member: zipfile.ZipInfo, *args: Any) -> Any:
        opened.append(member.file_size)
        return original(self, member, *args)

    monkeypatch.setattr(integrity, "shards_of", lambda path: None)
    path = put(tmp_path)
    with zipfile.ZipFile(path) as archive:
        whole = sum(member.file_size for member in archive.infolist())
    monkeypatch.setattr(zipfile.ZipFile, "open", noted)
    shares = []
    for rank in range(3):
        opened.clear()
        assert damage(path, rank, 3) is None
        shares.append(sum(opened))
    assert sum(shares) == whole
    assert max(shares) < 0.45 * whole


def loaded(distributed: Distributed, path: str) -> str:
    """The error of this rank."""
    try:
        checkpoint = load(Path(path), mmap=True, ranks=distributed)
    except UserError as error:
        return str(error)
    assert all(torch.equal(checkpoint["state_dict"][name], value) for name, value in WEIGHTS.items())
    return ""


@pytest.mark.parametrize("wrong", [(), (0,), (9,), (1, 8)])
def test_all_ranks_raise_the_error_of_one(wrong: tuple[int, ...], tmp_path: Path) -> None:
    path = put(tmp_path, *wrong)
    one, other = on_ranks(2, loaded, str(path))
    assert one == other
    assert ("epoch_2.pth is damaged: wrong checksum of" in one) is bool(wrong)
