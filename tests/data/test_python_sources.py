"""PythonSources: the files, their split, and the samples."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from examples.char_lm.python_sources import PythonSources, files_of
from hydraloop.data.in_memory import SPLITS
from hydraloop.errors import UserError

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
Make = Callable[[Mapping[str, bytes]], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Make:
    """Writes files into a folder."""

    def make(files: Mapping[str, bytes]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        return tmp_path

    return make


def numbered(count: int) -> dict[str, bytes]:
    """Files that repeat their name."""
    return {f"package/module_{number}.py": f"<{number}>".encode() * 40 for number in range(count)}


# The standard library. -----------------------------------------------------------------------------------------------


def test_the_parts_are_of_different_files_and_have_their_shares() -> None:
    parts = {split: files_of(LIBRARY, split) for split in SPLITS}
    together = [path for part in parts.values() for path in part]
    assert len(set(together)) == len(together) > 200
    assert len(parts["train"]) / len(together) == pytest.approx(0.9, abs=0.05)
    for split in ("val", "test"):
        assert len(parts[split]) / len(together) == pytest.approx(0.05, abs=0.03)
        assert PythonSources(split).blocks.numel() > 100_000, "enough to measure on"
    assert PythonSources("train").blocks.numel() > 4_000_000


# Files. --------------------------------------------------------------------------------------------------------------


def test_which_files_of_a_folder_are_read(folder: Make) -> None:
    kept = {"a.py": b"", "package/b.py": b"", "package/encodings/c.py": b"", "package/config-x.py": b""}
    left_out = {
        "d.txt": b"",
        "__pycache__/e.py": b"",
        "package/tests/f.py": b"",
        "test/g.py": b"",
        "site-packages/h.py": b"",
        "encodings/i.py": b"",
        "imp.py": b"",
        "_sysconfigdata_x86.py": b"",
        "config-3.11/j.py": b"",
    }
    root = folder(kept | left_out)
    assert sorted(path for split in SPLITS for path in files_of(root, split)) == sorted(kept)


# Samples. ------------------------------------------------------------------------------------------------------------


def test_targets_are_the_next_tokens() -> None:
    data = PythonSources("val", 16)
    tokens, targets = data[3]
    assert (tokens.shape, tokens.dtype, targets.dtype) == ((16,), torch.int64, torch.int64)
    assert torch.equal(tokens[1:], targets[:-1])
    assert torch.equal(data.blocks[3].to(torch.int64), torch.cat([tokens, targets[-1:]]))
    assert data.blocks.dtype == torch.uint8


# Mistakes. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"split": "tset"}, "split", "cannot be 'tset'"),
        ({"split": "train", "block_size": 0}, "block_size", "below 1"),
        ({"split": "train", "megabytes": 0.0}, "megabytes", "not above 0"),
        ({"split": "train", "root": "/nowhere"}, "root", "/nowhere is not a folder"),
        ({"split": "train", "block_size": 10**9}, "root", "too few for a block"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], key: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        PythonSources(**options)  # type: ignore[arg-type]
    assert caught.value.key == key
