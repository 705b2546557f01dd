"""Streams: the same samples in the same order, wherever a run is cut; each sample once; draws that can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from hydraloop.data.stream_loader import StreamLoader, TrainStreamLoader
from hydraloop.engine.batch_transfer import one_ahead
from hydraloop.errors import UserError
from tests.data.streams import Buffered, ByWorker, Numbers, Plain, Shards, Sized, stream_loader
from tests.marks import slow

STEPS = 7


def train_loader(dataset: Any, **options: Any) -> TrainStreamLoader:
    loader = stream_loader(dataset, train=True, **{"steps_per_epoch": STEPS, **options})
    assert isinstance(loader, TrainStreamLoader)
    return loader


def val_loader(dataset: Any, **options: Any) -> StreamLoader:
    return stream_loader(dataset, train=False, **options)


def listed(batch: Any) -> Any:
    return {name: value.tolist() for name, value in batch.items()} if isinstance(batch, dict) else batch.tolist()


def run(
    loader: TrainStreamLoader, begin: int, end: int, ahead: bool = False, listed: Callable[[Any], Any] = listed
) -> list[Any]:
    """Consume the batches from number `begin` to `end` of a run, in epochs."""
    consumed, number = [], begin
    while number < end:
        batches = iter(loader.begin(number % STEPS, number))
        if ahead:
            batches = one_ahead(batches, lambda batch: batch, lambda batch: batch)
        for batch in batches:
            consumed.append(listed(batch))
            number += 1
            if number == end:
                break
        del batches
    return consumed


def cut_run(
    make: Any, cuts: tuple[int, ...], end: int, listed: Callable[[Any], Any] = listed, **options: Any
) -> list[Any]:
    """As `run` to the end, in another loader after each cut."""
    loader, at, consumed = train_loader(make(), **options), 0, []
    for cut in cuts:
        consumed += run(loader, at, cut, loader.num_workers > 0, listed)
        state = loader.state_at(cut % STEPS, cut)
        loader.end_workers()
        random.random(), torch.rand(1), np.random.rand()  # another process has other generators
        loader = train_loader(make(), **options)
        loader.load_state(state, cut % STEPS, cut)
        at = cut
    consumed += run(loader, at, end, listed=listed)
    loader.end_workers()
    return consumed


CUTS = ((5,), (4, 5, 13), (7, 8, 14, 19))


@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize(
    ("make", "options"),
    [(Shards, {}), (Numbers, {"skip_on_resume": True}), (Buffered, {"skip_on_resume": True})],
)
def test_a_run_that_was_cut_reads_what_a_whole_one_reads(make: Any, options: dict[str, Any], workers: int) -> None:
    options = {**options, "num_workers": workers}
    whole = cut_run(make, (), 24, **options)
    assert len({str(batch) for batch in whole}) == 24, "all batches differ, some only in their noise"
    for cuts in CUTS:
        assert cut_run(make, cuts, 24, **options) == whole, cuts


@pytest.mark.slow
def test_workers_can_be_spawned() -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}
    assert cut_run(Shards, (4,), 8, **options) == cut_run(Shards, (), 8, num_workers=2)


def test_an_epoch_continues_where_the_last_one_ended_and_all_batches_are_full() -> None:
    loader = train_loader(Shards((5, 2, 3)), batch_size=4)
    numbers = [batch["x"] for batch in run(loader, 0, 5)]
    order = [0, 1, 2, 3, 4, 100, 101, 200, 201, 202]
    assert list(chain(*numbers)) == order + order
    assert all(len(batch) == 4 for batch in numbers)


def test_the_global_generators_are_neither_read_nor_changed() -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())

    before = states()
    first = run(train_loader(Numbers()), 0, 9)
    assert states() == before
    torch.manual_seed(5)
    assert run(train_loader(Numbers()), 0, 9) == first
    assert run(train_loader(Numbers(), seed=1), 0, 9) != first


def test_the_end_of_a_stream_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run(train_loader(Shards((5, 3))), 0, 14)
    assert caplog.messages == ["data.train: the stream has ended in iteration 3 and begins again; reported once"]


def test_a_stop_with_a_batch_fetched_ahead_loses_no_batch() -> None:
    whole = run(train_loader(Numbers()), 0, 14)
    loader = train_loader(Numbers())
    begun = run(loader, 0, 3, ahead=True)
    failed = one_ahead(iter(loader.begin(3, 3)), lambda batch: batch, lambda batch: batch)
    assert listed(next(failed)) == whole[3]
    failed.close()  # by an error in the training step
    assert begun + run(loader, 3, 10, ahead=True) + run(loader, 10, 14) == whole


# Splits. -------------------------------------------------------------------------------------------------------------


def parts_of_a_pass(dataset: Any, world_size: int, workers: int, **options: Any) -> list[list[int]]:
    """The samples of each rank, read once."""
    options = {"steps_per_epoch": 99, "num_workers": workers, "world_size": world_size, **options}
    loaders = [val_loader(dataset, rank=rank, **options) for rank in range(world_size)]
    return [[number for batch in loader for number in numbers_of(batch)] for loader in loaders]


def numbers_of(batch: Any) -> list[int]:
    numbers: list[int] = (batch["x"] if isinstance(batch, dict) else batch).tolist()
    return numbers


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (2, 2)])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [(Numbers(), {}), (Shards(), {}), (Plain(), {"split_stream": True}), (Plain(), {"collate_fn": torch.tensor})],
)
def test_ranks_and_workers_together_read_each_sample_once(
    dataset: Any, options: dict[str, Any], world_size: int, workers: int
) -> None:
    if isinstance(dataset, Plain):
        options = {**options, "split_stream": True}
    (whole,) = parts_of_a_pass(dataset, 1, 0)
    parts = parts_of_a_pass(dataset, world_size, workers, **options)
    assert all(parts)
    assert sorted(chain(*parts)) == sorted(whole)


def test_a_set_that_splits_itself_is_not_split_again() -> None:
    (numbers,) = parts_of_a_pass(ByWorker(), 1, 2, split_stream=False)
    assert sorted(numbers) == list(range(10))


def test_a_torch_set_that_does_not_say_how_it_is_split_is_refused() -> None:
    assert parts_of_a_pass(Plain(4), 1, 1) == [[0, 1, 2, 3]], "one worker reads it all"
    with pytest.raises(
        UserError, match=r"data\.train: Plain does not say how 6 workers \(of all ranks\) share it"
    ) as caught:
        train_loader(Plain(), world_size=2, num_workers=3)
    assert "split(index, count)" in str(caught.value.remedy)
    assert "data.loader.split_stream=true" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("dataset", "world_size", "message"),
    [
        (Plain(0), 1, "data.train: part 1 of 1 of the stream .* has no samples"),
        (Shards((3,)), 2, "part 2 of 2 of the stream .* has no samples"),
    ],
)
def test_a_worker_without_samples_is_refused(dataset: Any, world_size: int, message: str) -> None:
    loader = train_loader(dataset, rank=world_size - 1, world_size=world_size)
    with pytest.raises(UserError, match=message):
        run(loader, 0, 1)


# Lengths. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "steps"), [({}, 4), ({"drop_last": True}, 3), ({"steps_per_epoch": 9}, 9)])
def test_an_epoch_has_the_length_of_the_set_or_of_the_option(options: dict[str, Any], steps: int) -> None:
    loader = stream_loader(Sized(10), train=True, **options)
    assert len(loader) == steps


def test_a_stream_without_a_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.train: Plain has no length") as caught:
        stream_loader(Plain(), train=True)
    assert "data.loader.steps_per_epoch=1000" in str(caught.value.remedy)
    with pytest.raises(UserError, match=r"data\.val: Plain has no length") as caught:
        stream_loader(Plain(), train=False)
    assert "data.val_loader.steps_per_epoch=1000" in str(caught.value.remedy)


def test_an_evaluation_reads_each_sample_once_from_the_beginning() -> None:
    loader = val_loader(Sized(8), num_workers=0)
    assert [listed(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [listed(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert len(list(val_loader(Sized(8), steps_per_epoch=2))) == 2
    assert len(list(val_loader(Sized(8), steps_per_epoch=9))) == 3


class SizedShards(Shards):
    """With a length."""

    def __len__(self) -> int:
        return sum(map(len, self.shards))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 0), (2, 2)])
def test_an_evaluation_with_a_length_reads_all_samples_of_unequal_parts(world_size: int, workers: int) -> None:
    for dataset, options in ((SizedShards((8, 2, 1, 1)), {}), (Sized(10), {"split_stream": True})):
        (whole,) = parts_of_a_pass(dataset, 1, 0, batch_size=4, steps_per_epoch=None)
        assert len(whole) == len(dataset)
        parts = parts_of_a_pass(dataset, world_size, workers, batch_size=4, steps_per_epoch=None, **options)
        assert sorted(chain(*parts)) == sorted(whole)


def test_a_worker_may_have_no_samples_of_an_evaluation_and_a_rank_may_not() -> None:
    assert sorted(chain(*parts_of_a_pass(Shards((5,)), 1, 2))) == [0, 1, 2, 3, 4]
    for last in (
        val_loader(Shards((5,)), rank=1, world_size=2, steps_per_epoch=9),
        val_loader(Shards(()), steps_per_epoch=9),
    ):
        with pytest.raises(UserError, match=r"data\.\w+: the stream has no samples for this rank"):
            list(last)


# Resume: what is refused. --------------------------------------------------------------------------------------------


def resumed(dataset: Any, at: int, **options: Any) -> TrainStreamLoader:
    """A loader at the position that another one had after `at` batches."""
    loader = train_loader(dataset)
    run(loader, 0, at)
    state = loader.state_at(at % STEPS, at)
    loader = train_loader(dataset, **options)
    loader.load_state(state, at % STEPS, at)
    return loader


def test_a_set_without_a_state_is_refused_inside_an_epoch() -> None:
    with pytest.raises(UserError, match="Numbers has no state_dict, so it cannot continue inside an epoch") as caught:
        resumed(Numbers(), 4)
    assert "data.loader.skip_on_resume=true" in str(caught.value.remedy)
    assert caught.value.key == "data.train"


def test_a_set_without_a_state_begins_again_at_the_end_of_an_epoch_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = resumed(Numbers(), STEPS)
    (message,) = caplog.messages
    assert "so it begins again. Set data.loader.skip_on_resume=true to read it forward" in message
    assert all(number >= 100 for batch in run(loader, STEPS, 2 * STEPS) for number in batch["x"]), "of the next pass"


@pytest.mark.parametrize(
    ("options", "now"),
    [({"num_workers": 2}, "has 1 ranks and 2 workers"), ({"world_size": 2}, "has 2 ranks and 1 workers")],
)
def test_other_numbers_of_workers_or_ranks_are_refused(options: dict[str, Any], now: str) -> None:
    with pytest.raises(UserError, match=f"a stream on 1 ranks, with 1 workers on each; this run {now}") as caught:
        resumed(Shards(), 4, **options)
    assert "resume_strict=false to begin the stream again" in str(caught.value.remedy)


def test_no_workers_and_one_worker_read_the_same() -> None:
    assert run(resumed(Shards(), 4, num_workers=1), 4, 9) == run(resumed(Shards(), 4), 4, 9)


def test_a_checkpoint_of_other_data_is_refused() -> None:
    with pytest.raises(
        UserError, match="a stream on 0 ranks, with 0 workers on each; this run has 1 ranks and 1 workers"
    ):
        train_loader(Shards()).load_state(None, 0, 5)
