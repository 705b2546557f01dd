"""SyncRandomSizeHook: which sizes the model gets and when, equal on all ranks and in resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.hooks.sync_random_size import SyncRandomSizeHook
from hydraloop.models import SmallCNN
from hydraloop.tasks import Classification
from tests.helpers import at, failing
from tests.hooks import tiny_runs
from tests.ranks import on_ranks

Size = tuple[int, int]


class Watched(nn.Module):
    """A classifier that records the sizes of its inputs, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SmallCNN(1, 2, width=2)
        self.sizes: dict[bool, list[Size]] = {True: [], False: []}
        self.last = torch.zeros(0)

    def forward(self, images: Tensor) -> Tensor:
        self.sizes[self.training].append((images.shape[2], images.shape[3]))
        self.last = images
        logits: Tensor = self.inner(images)
        return logits


class Boxes(Classification):
    """A task that changes sizes itself, as a detector would."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told: list[Size] = []

    def set_input_size(self, size: Size) -> None:
        self.told.append(size)


def engine_of(
    run_dir: Path,
    hook: SyncRandomSizeHook,
    *,
    shape: tuple[int, ...] = (1, 8, 12),
    seed: int = 0,
    task: type[Classification] = Classification,
    model: nn.Module | None = None,
    distributed: Distributed | None = None,
    hooks: dict[str, Hook] | None = None,
    **settings: Any,
) -> Engine:
    """Three epochs of five batches of images."""
    data = InMemoryDataset(torch.rand(10, *shape), torch.arange(10) % 2)
    ranks = {} if distributed is None else {"rank": distributed.rank, "world_size": distributed.world_size}
    return tiny_runs.engine_of(
        run_dir,
        {"sync_random_size": hook, **(hooks or {})},
        task=task(Watched() if model is None else model, nn.CrossEntropyLoss()),
        loaders=Loaders(*(build_loader(data, shuffle=shuffle, batch_size=2, **ranks) for shuffle in (True, False))),
        seed=seed,
        distributed=distributed,
        **settings,
    )


def sizes(run_dir: Path, hook: SyncRandomSizeHook, **options: Any) -> list[Size]:
    """Of each iteration."""
    engine = engine_of(run_dir, hook, **options)
    engine.train()
    found: list[Size] = engine.model.sizes[True]  # type: ignore[union-attr, index, assignment]
    return found


def test_a_new_size_every_interval_within_the_range_and_in_proportion(tmp_path: Path) -> None:
    found = sizes(tmp_path, SyncRandomSizeHook(interval=1), max_epochs=40)
    assert {height for height, _ in found} == {6, 7, 8, 9, 10}  # 0.7 and 1.3 of 8 are 5.6 and 10.4
    assert {(height, width) for height, width in found} == {(6, 9), (7, 10), (8, 12), (9, 14), (10, 15)}
    counts = [found.count(size) for size in set(found)]
    assert min(counts) > 20, "each of five sizes in about 40 of 200 iterations"


def test_sizes_are_multiples_of_the_divisor(tmp_path: Path) -> None:
    found = sizes(tmp_path, SyncRandomSizeHook(interval=1, divisor=4, max_ratio=2.1), max_epochs=12)
    assert {height for height, _ in found} == {8, 12, 16}
    assert all(width % 4 == 0 for _, width in found)


@pytest.mark.parametrize(
    ("options", "side", "drawn"),
    [
        ({"divisor": 32}, 640, [32 * n for n in range(14, 27)]),  # MMDetection's (14, 26)
        ({"min_ratio": 1.1, "max_ratio": 1.15}, 100, [110, 111, 112, 113, 114, 115]),  # 1.1 * 100 is above 110
    ],
)
def test_both_ends_of_the_range_are_drawn(options: dict[str, Any], side: int, drawn: list[int], tmp_path: Path) -> None:
    class Big(nn.Module):
        """Cheap on large images."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.sizes = nn.Linear(1, 2), set[Size]()

        def forward(self, images: Tensor) -> Tensor:
            self.sizes.add((images.shape[2], images.shape[3]))
            logits: Tensor = self.linear(images.mean((2, 3)))
            return logits

    hook, model = SyncRandomSizeHook(interval=1, **options), Big()
    engine_of(tmp_path, hook, model=model, shape=(1, side, side), max_epochs=20, val_interval=None).train()
    assert sorted(model.sizes) == [(side, side) for side in drawn]


def test_evaluation_and_what_comes_after_training_are_at_the_original_size(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, SyncRandomSizeHook(min_ratio=2.0, max_ratio=2.0))
    engine.train()
    assert set(engine.model.sizes[True]) == {(16, 24)}  # type: ignore[index, arg-type]
    assert set(engine.model.sizes[False]) == {(8, 12)}  # type: ignore[index, arg-type]
    engine.model.train()
    engine.model(torch.zeros(2, 1, 8, 12))
    assert engine.model.sizes[True][-1] == (8, 12)  # type: ignore[index]
    engine.train()  # the hook is also removed from an engine that is used again
    assert not engine.model._forward_pre_hooks


def test_after_an_error_the_model_is_itself_again(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, SyncRandomSizeHook(), hooks={"failing": failing("after_train_iter")})
    with pytest.raises(RuntimeError):
        engine.train()
    assert not engine.model._forward_pre_hooks


def test_images_are_interpolated(tmp_path: Path) -> None:
    given: list[Tensor] = []

    class Take(Hook):
        def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
            given.append(batch[0])

    engine = engine_of(
        tmp_path,
        SyncRandomSizeHook(min_ratio=2.0, max_ratio=2.0),
        max_iters=1,
        hooks={"take": Take()},
        val_interval=None,
    )
    engine.train()
    assert given[0].shape == (2, 1, 8, 12), "the batch is unchanged"
    pooled = nn.functional.avg_pool2d(engine.model.last, 2)  # type: ignore[arg-type]
    assert torch.nn.functional.cosine_similarity(pooled.flatten(), given[0].flatten(), dim=0) > 0.9


def test_the_sizes_are_those_of_seed_and_iteration(tmp_path: Path) -> None:
    def run(seed: int, batch_noise: int) -> list[Size]:
        torch.manual_seed(batch_noise)
        return sizes(tmp_path / f"{seed}_{batch_noise}", SyncRandomSizeHook(interval=2, max_ratio=3.0), seed=seed)

    assert run(0, 0) == run(0, 1)
    assert run(0, 0) != run(1, 0)


def test_a_resumed_run_has_the_sizes_it_would_have_had(tmp_path: Path) -> None:
    saving = at("after_train_iter", lambda engine: engine.request_checkpoint("at_7", agreed=True), nth=7)

    def hook() -> SyncRandomSizeHook:
        return SyncRandomSizeHook(interval=4, max_ratio=3.0)

    whole = sizes(
        tmp_path / "one",
        hook(),
        hooks={"saving": saving},
    )
    rest = sizes(tmp_path / "two", hook(), resume=tmp_path / "one" / "checkpoints" / "at_7.pth")
    assert (len(whole), len(rest)) == (15, 8)
    assert rest == whole[7:]


def test_a_task_with_boxes_gets_the_size_and_nothing_is_interpolated(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "told", SyncRandomSizeHook(interval=4, max_ratio=3.0), task=Boxes)
    engine.train()
    assert set(engine.model.sizes[True]) == {(8, 12)}  # type: ignore[index, arg-type]
    same = sizes(tmp_path / "same", SyncRandomSizeHook(interval=4, max_ratio=3.0))
    assert engine.task.told == [same[0], same[4], same[8], same[12]]


@pytest.mark.parametrize(
    ("shape", "got"), [((3,), r"a tensor \[2, 3\]"), ((1, 8), r"a tensor \[2, 1, 8\]"), ((1, 2, 8, 8), "a tensor")]
)
def test_inputs_that_are_no_images_are_one_clear_error(shape: tuple[int, ...], got: str, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, SyncRandomSizeHook(), shape=shape)
    with pytest.raises(UserError, match=rf"^hooks.sync_random_size: .*the model's first input is {got}"):
        engine.train()


@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_for_each_size(tmp_path: Path) -> None:
    compiled: list[Any] = []
    seen: set[int] = set()

    def backend(graph: Any, examples: list[Any]) -> Any:
        compiled.append(graph)

        def run(*inputs: Any) -> Any:
            seen.update(value.shape[2] for value in inputs if isinstance(value, Tensor) and value.shape[:2] == (2, 1))
            return graph.forward(*inputs)

        return run

    model = SmallCNN(1, 2, width=4)
    torch._dynamo.reset()
    model.compile(backend=backend)
    engine_of(tmp_path, SyncRandomSizeHook(interval=1), model=model, val_interval=None, max_epochs=4).train()
    assert seen == {6, 7, 8, 9, 10}
    assert len(compiled) == 2 if torch.__version__ >= "2.13" else len(compiled) <= 4, "for the first size, then for any"


def _sizes_of_a_rank(distributed: Distributed, run_dir: str) -> list[Size]:
    torch.manual_seed(distributed.rank)  # the ranks have different random numbers
    hook = SyncRandomSizeHook(interval=2, max_ratio=3.0)
    return sizes(Path(run_dir), hook, distributed=distributed, max_epochs=4)


def test_all_ranks_have_the_same_sizes(tmp_path: Path) -> None:
    first, second = on_ranks(2, _sizes_of_a_rank, str(tmp_path))
    assert first == second
    assert len(set(first)) > 2
