"""Which checkpoint of a run was written last."""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path

import pytest

from hydraloop.files.checkpoint_files import intact_before, newest_intact, point_to


def put(folder: Path, name: str, at: float) -> Path:
    """A complete checkpoint, written at that time in seconds."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}.pth", "w") as file:
        file.writestr("data", "tensors")
    os.utime(folder / f"{name}.pth", (at, at))
    return folder / f"{name}.pth"


def names(folder: Path, *files: str) -> None:
    for at, name in enumerate(files):
        put(folder, name, at)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["epoch_2", "epoch_10", "epoch_9"], "epoch_9"),  # after resume=epoch_8.pth, 9 belongs to the new branch
        (["epoch_3", "best_accuracy_epoch_4", "best_loss_epoch_2"], "best_loss_epoch_2"),
        (["epoch_1", "iter_30", "preempted"], "preempted"),
        (["epoch_2", "epoch_2_published"], "epoch_2"),
    ],
)
def test_without_last_checkpoint_the_times_of_the_files_decide(files: list[str], expected: str, tmp_path: Path) -> None:
    names(tmp_path, *files)
    assert newest_intact(tmp_path) == tmp_path / f"{expected}.pth"


def test_last_checkpoint_decides_also_in_a_copied_folder(tmp_path: Path) -> None:
    names(tmp_path, "epoch_4", "epoch_6", "epoch_5")  # a copy has other times
    point_to(tmp_path / "epoch_4.pth")
    assert newest_intact(tmp_path) == tmp_path / "epoch_4.pth"


@pytest.mark.parametrize("content", [b"PK", None])
def test_an_incomplete_or_missing_file_is_passed_over(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names(tmp_path, "epoch_3", "epoch_1")
    if content is not None:
        (tmp_path / "epoch_2.pth").write_bytes(content)
    for _ in range(2):
        assert newest_intact(tmp_path) == tmp_path / "epoch_1.pth"
        point_to(tmp_path / "epoch_2.pth")
    assert f"epoch_2.pth is {'missing' if content is None else 'damaged'}" in caplog.text


@pytest.mark.parametrize("text", ["", "\n", "../elsewhere/epoch_1.pth\n", ".", "\0"])
def test_a_last_checkpoint_that_names_no_file_of_its_folder_is_ignored(text: str, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", "epoch_1", 9)
    names(tmp_path / "checkpoints", "epoch_1")
    (tmp_path / "checkpoints" / "last_checkpoint").write_text(text)
    assert newest_intact(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "epoch_1.pth"


def test_of_several_folders_the_one_that_was_written_to_last_decides(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    names(first, "epoch_2", "epoch_6")
    put(second, "epoch_3", 100)
    assert newest_intact(first, second, tmp_path / "none") == second / "epoch_3.pth"
    point_to(first / "epoch_2.pth")  # the run has been resumed from it
    assert newest_intact(first, second) == first / "epoch_2.pth"
    assert newest_intact() is None


def flip(path: Path) -> None:
    """Flip a bit of the contents, and keep the file's times, as a bad disk does."""
    at = path.stat().st_mtime
    content = bytearray(path.read_bytes())
    content[content.index(b"tensors")] ^= 1
    path.write_bytes(content)
    os.utime(path, (at, at))


def test_a_damaged_file_gets_a_warning_and_the_one_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names(tmp_path, "epoch_2", "epoch_5", "epoch_3", "epoch_4")  # 5 is of an earlier part, before resume=epoch_2.pth
    point_to(tmp_path / "epoch_4.pth")
    for damaged, expected in (("epoch_4", "epoch_3"), ("epoch_3", "epoch_2"), ("epoch_2", "epoch_5")):
        flip(tmp_path / f"{damaged}.pth")
        with caplog.at_level(logging.WARNING):
            assert newest_intact(tmp_path) == tmp_path / f"{expected}.pth"
        (line,) = caplog.messages
        assert line == f"{tmp_path / damaged}.pth is damaged (wrong checksum of data): the checkpoint before it is used"
        caplog.clear()
    flip(tmp_path / "epoch_5.pth")
    assert newest_intact(tmp_path) is None


def test_the_checkpoint_before_one(tmp_path: Path) -> None:
    names(tmp_path, "epoch_1", "epoch_2", "epoch_3", "epoch_3_published", "epoch_4")
    flip(tmp_path / "epoch_2.pth")
    assert intact_before(tmp_path / "epoch_3.pth") == tmp_path / "epoch_1.pth"
    assert intact_before(tmp_path / "epoch_1.pth") is None
    assert intact_before(tmp_path / "none" / "epoch_1.pth") is None
