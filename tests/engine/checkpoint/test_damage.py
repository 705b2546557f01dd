"""Damage in checkpoint files: each is reported, or the file still loads equal bits; ranks verify a file together."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.checkpoint.format import load, write
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.files import integrity
from hydraloop.files.checkpoint_files import is_complete
from hydraloop.files.integrity import damage
from tests.faults import checkpoints
from tests.helpers import differences
from tests.ranks import on_ranks

CHECKPOINT: dict[str, Any] = {
    "state_dict": {"weight": torch.randn(40, 9), "bias": torch.arange(300), "empty": torch.empty(0)},
    "meta": {"name": "a run", "lr": [0.1, 0.2]},
}


def put(folder: Path) -> Path:
    write(folder / "epoch_2.pth", CHECKPOINT)
    return folder / "epoch_2.pth"


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", checkpoints.RANDOM)
def test_random_damage_is_reported_or_harmless(suffix: str, kind: str, tmp_path: Path) -> None:
    found = checkpoints.measure(tmp_path, suffix, kind, cases=30, seed=1)
    assert (found["cases"], found["wrong"]) == (30, 0)
    assert found["reported"] > 15
    assert found["alone"] or kind == "a cut-off end", "the checksums are needed"


def test_each_bit_that_says_where_a_tensor_is_counts(tmp_path: Path) -> None:
    """torch reads such a file without an error, and some tensors then have arbitrary values."""
    path = put(tmp_path)
    whole = path.read_bytes()
    entry = whole.rindex(b"PK\1\2", 0, whole.index(b"/version", whole.index(b"PK\1\2")))
    flipped = [(byte, bit) for byte in (9, *range(20, 36), 38) for bit in range(8)]
    for byte, bit in flipped:
        content = bytearray(whole)
        content[entry + byte] ^= 1 << bit
        path.write_bytes(content)
        with suppress(UserError):
            assert not list(differences(load(path), CHECKPOINT)), (byte, bit)


@pytest.mark.nightly
def test_each_bit_of_the_headers_is_reported_or_harmless(tmp_path: Path) -> None:
    found = checkpoints.measure(tmp_path, ".pth", checkpoints.HEADERS, cases=0, seed=1)
    assert found["cases"] > 5000
    assert found["wrong"] == 0


def test_a_damaged_file_is_an_error_that_names_the_checkpoint_before_it(tmp_path: Path) -> None:
    write(tmp_path / "epoch_1.pth", CHECKPOINT)
    path = put(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(CHECKPOINT["state_dict"]["weight"].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    for mmap in (False, True):
        with pytest.raises(UserError, match=r"epoch_2\.pth is damaged: wrong checksum of .*/data/") as caught:
            load(path, key="load_from", mmap=mmap)
        assert caught.value.key == "load_from"
        assert caught.value.remedy == f"Use the checkpoint before it: load_from={tmp_path / 'epoch_1.pth'}"
    content[content.index(b"state_dict")] ^= 1  # the loading fails, too
    path.write_bytes(content.replace(b"ctorch._utils", b"ctorch._utilz"))
    with pytest.raises(UserError, match="is damaged: wrong checksum"):
        load(path)


def test_files_of_other_programs_are_checked_by_member(tmp_path: Path) -> None:
    """Files of other programs."""
    path = tmp_path / "epoch_1.pth"
    torch.save(CHECKPOINT, path)
    assert damage(path) is None
    content = bytearray(path.read_bytes())
    content[content.index(CHECKPOINT["state_dict"]["weight"].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert str(damage(path)).startswith("wrong checksum of epoch_1/data/")


def test_files_of_other_programs_without_checksums_are_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors")
    assert damage(tmp_path / "other.safetensors") is None
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CHECKPOINT, tmp_path / "other.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    assert is_complete(tmp_path / "other.pth")
    assert not list(differences(load(tmp_path / "other.pth"), CHECKPOINT))
    assert damage(tmp_path / "none.pth") == "No such file or directory"


WEIGHTS = {str(number): torch.full((4000,), float(number + 1)) for number in range(10)}


def put_weights(folder: Path, *wrong: int) -> Path:
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
    path = put_weights(tmp_path, wrong)
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
    path = put_weights(tmp_path)
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
    path = put_weights(tmp_path, *wrong)
    one, other = on_ranks(2, loaded, str(path))
    assert one == other
    assert ("epoch_2.pth is damaged: wrong checksum of" in one) is bool(wrong)
