"""SyncNormHook: statistics of ranks that have seen other data, before each evaluation; on the average weights, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.parts import Loaders, Settings
from hydraloop.hooks import EMAHook, SyncNormHook
from hydraloop.tasks import Regression
from tests.hooks.test_sync_buffers import NORM, assert_averaged, run
from tests.ranks import on_ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_before_each_evaluation_all_ranks_have_the_mean(strategy: str, tmp_path: Path) -> None:
    results = on_ranks(2, run, str(tmp_path), "sync_norm", {}, strategy=strategy)
    for point in ("before_val 4", "before_val 8"):
        assert_averaged([first[point] for first, _ in results], [last[point] for _, last in results], NORM)
    for first, last in results:
        assert torch.equal(last["before_val_iter 4"][NORM[0]], last["before_val 4"][NORM[0]])
        assert not torch.equal(first["after_train_epoch 4"][NORM[0]], last["before_val 4"][NORM[0]])


def test_before_the_test_where_nothing_was_validated(tmp_path: Path) -> None:
    results = on_ranks(2, run, str(tmp_path), "sync_norm", {"val_interval": None})
    assert_averaged(
        [first["before_test 8"] for first, _ in results], [last["before_test 8"] for _, last in results], NORM
    )


def test_only_statistics_of_normalisation_layers_are_averaged(tmp_path: Path) -> None:
    results = on_ranks(2, run, str(tmp_path), "sync_norm", {"max_epochs": 1})
    for rank, (_, last) in enumerate(results):
        assert last["before_val 4"]["seen"].tolist() == [0, 1 + 3 * rank]
        assert last["before_val 4"]["body.1.num_batches_tracked"].item() == 4


def collectives(distributed: Distributed, run_dir: str) -> int:
    """How many collectives among the devices one averaging of three layers takes."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 1), nn.InstanceNorm1d(1))
    engine = Engine(
        task=Regression(net, nn.MSELoss()),
        loaders=Loaders(),
        hooks={"sync_norm": (hook := SyncNormHook())},
        settings=Settings(device="cpu"),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    hosts = distributed._hosts  # type: ignore[attr-defined]
    before = hosts._get_sequence_number_for_group()
    hook.before_val(engine)
    return int(hosts._get_sequence_number_for_group() - before)


def test_one_all_reduce_for_all_layers(tmp_path: Path) -> None:
    assert on_ranks(2, collectives, str(tmp_path)) == [1, 1]


def with_ema(distributed: Distributed, run_dir: str) -> tuple[dict[str, float], Tensor]:
    """Metrics of a validation on average weights, whose statistics are the raw model's; and those afterwards."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    task = Regression(net, nn.MSELoss())
    generator = torch.Generator().manual_seed(distributed.rank)
    train = [(torch.randn(4, 3, generator=generator) + 3 * distributed.rank, torch.ones(4, 1)) for _ in range(4)]
    engine = Engine(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders(train, [(torch.ones(4, 3), torch.ones(4, 1))]),
        hooks={"ema": EMAHook(update_buffers=True), "sync_norm": SyncNormHook()},
        settings=Settings(device="cpu", max_epochs=1),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    engine.train()
    return engine.metrics, net.state_dict()["1.running_mean"]


def test_the_raw_models_statistics_are_averaged_before_the_average_is_put_in(tmp_path: Path) -> None:
    (metrics, zero), (others, one) = on_ranks(2, with_ema, str(tmp_path))
    assert metrics == others
    assert torch.equal(zero, one), "what was put into the model for the validation is out again"


def test_one_process_has_nothing_to_do(tmp_path: Path) -> None:
    first, last = run(Distributed(), str(tmp_path), "sync_norm", {})
    for point, buffers in first.items():
        assert all(torch.equal(buffers[name], last[point][name]) for name in buffers)
