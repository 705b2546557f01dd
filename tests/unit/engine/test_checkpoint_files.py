"""Which checkpoint of a folder is the newest."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from hydraloop.engine.checkpoint_files import newest_complete


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["epoch_2", "epoch_10", "epoch_9"], "epoch_10"),
        (["iter_100", "iter_20"], "iter_100"),
        (["epoch_3", "best_accuracy_epoch_4", "best_loss_epoch_2"], "best_accuracy_epoch_4"),
        (["epoch_1", "iter_30", "epoch_9"], "epoch_9"),  # numbers of different kinds: the one written last
        (["epoch_2", "epoch_2_published"], "epoch_2"),
    ],
)
def test_the_newest_of_a_copied_folder(names: list[str], expected: str, tmp_path: Path) -> None:
    for index, name in enumerate(names):
        with zipfile.ZipFile(tmp_path / f"{name}.pth", "w") as file:
            file.writestr("data", "")
        os.utime(tmp_path / f"{name}.pth", (index, index))
    assert newest_complete(tmp_path) == tmp_path / f"{expected}.pth"


def test_an_incomplete_one_is_passed_over(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "epoch_1.pth", "w") as file:
        file.writestr("data", "")
    (tmp_path / "epoch_2.pth").write_bytes(b"PK")
    assert newest_complete(tmp_path) == tmp_path / "epoch_1.pth"
