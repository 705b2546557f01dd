"""`engine.predict`: in the order of the data, each sample once, with any number of ranks, as a test sees the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import EMAHook, TestTimeAugmentationHook
from hydraloop.tasks import Classification, HuggingFace, Task
from hydraloop.tasks.metrics import Accuracy
from tests.helpers import EngineWithNeededHooks, batches, make_engine
from tests.ranks import on_ranks

SAMPLES = 13
"""With 2 ranks and batches of 4, rank 1 has fewer samples in the last batch; with 3 ranks, rank 2 has none."""


class Named(Task):
    """Predicts the number, and a text of any length, for each sample."""

    def predict(self, batch: Any) -> Any:
        numbers, _ = batch
        return {"twice": self.model(numbers) * 2, "name": [f"{'x' * int(n)}" for n in numbers[:, 0]]}


def numbers(samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((1,), float(n)), torch.zeros(1)) for n in range(samples)]


def predicted(ranks: Distributed, run_dir: str) -> tuple[list[float], list[str], bool]:
    task = Named(nn.Identity() if not ranks.sharded else _one(), nn.MSELoss())
    ranks.prepare(task.model)
    data: Any = numbers()
    loader = build_loader(data, shuffle=False, batch_size=4, rank=ranks.rank, world_size=ranks.world_size)
    engine = EngineWithNeededHooks(
        task=task,
        loaders=Loaders(test=loader),
        distributed=ranks,
        run_dir=Path(run_dir),
        settings=Settings(device="cpu"),
    )
    task.train()
    found = list(engine.predict())
    return (
        torch.cat([one["twice"] for one in found]).flatten().tolist(),
        [name for one in found for name in one["name"]],
        task.training,
    )


def _one() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


EXPECTED = ([2.0 * n for n in range(SAMPLES)], ["x" * n for n in range(SAMPLES)], True)


def test_in_one_process(tmp_path: Path) -> None:
    assert predicted(Distributed(), str(tmp_path)) == EXPECTED


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "auto"), (3, "auto"), (3, "fsdp2")])
def test_each_rank_gets_all_predictions_in_order(world_size: int, strategy: str, tmp_path: Path) -> None:
    assert on_ranks(world_size, predicted, str(tmp_path), strategy=strategy) == [EXPECTED] * world_size


def test_predictions_are_those_of_the_test_with_ema_and_tta(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 1, 4, 4, generator=generator)  # 6 batches of 3
    classes = torch.randint(5, (6, 3), generator=generator)
    data = list(zip(images, classes, strict=True))
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 5))
    task = Classification(model, nn.CrossEntropyLoss(), {"accuracy": Accuracy()})
    hooks = {"ema": EMAHook(momentum=0.5), "tta": TestTimeAugmentationHook(transforms=["identity", "hflip"])}
    engine = make_engine(tmp_path, hooks, train=data, test=data, task=task, lr=0.5)
    engine.train()
    raw = {name: value.clone() for name, value in model.state_dict().items()}
    logits = torch.cat(list(engine.predict()))
    assert nn.functional.cross_entropy(logits, classes.flatten()).item() == pytest.approx(
        engine.evaluator.test_metrics["loss"], abs=1e-6
    )
    assert (logits.argmax(1) == classes.flatten()).double().mean().item() == engine.evaluator.test_metrics["accuracy"]
    unlabeled = list(images)
    assert torch.equal(torch.cat(list(engine.predict(unlabeled))), logits)
    next(engine.predict())  # dropped after one batch
    assert all(torch.equal(raw[name], value) for name, value in engine.model.state_dict().items())
    assert engine.task.model is model
    assert engine.progress.mode == "train"
    assert torch.is_grad_enabled()


class Encoder(nn.Module):
    """As a model of transformers: a loss if there are labels, and an output that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {} if labels is None else {"loss": labels.float().mean()}
        return {**found, "logits": input_ids * self.weight, "past_key_values": object()}


def test_a_model_of_transformers_predicts_with_and_without_labels(tmp_path: Path) -> None:
    ids = torch.arange(6).view(3, 2)
    engine = make_engine(tmp_path, task=HuggingFace(Encoder()))
    for batch in ({"input_ids": ids}, {"input_ids": ids, "labels": ids}):
        (found,) = engine.predict([batch])
        assert found.keys() == {"logits"}
        assert torch.equal(found["logits"], ids * 2.0)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.zeros(3, 2), "Wrong.predict returned Tensor [3, 2] for 4 samples"),
        (torch.tensor(1.0), "Wrong.predict returned Tensor [] for 4 samples"),
        ({"a": torch.zeros(4), "b": 1.0}, "Wrong.predict returned b: float for 4 samples"),
    ],
)
def test_predictions_without_an_entry_for_each_sample_are_refused(
    returned: Tensor | Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    class Wrong(Task):
        def predict(self, batch: Any) -> Any:
            return returned

    engine = make_engine(tmp_path, task=Wrong(nn.Linear(3, 1), nn.MSELoss()))
    with pytest.raises(UserError) as caught:
        list(engine.predict(batches(1)))
    assert caught.value.problem == said
    assert caught.value.key == "task"


def test_a_test_of_several_sets_or_of_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.test: there is no data set"):
        make_engine(tmp_path).predict()
    engine = make_engine(tmp_path)
    engine.batches.use(Loaders(test={"a": batches(1)}))
    with pytest.raises(UserError, match=r"engine\.predict\(engine\.loaders\.test\['a'\]\)"):
        engine.predict()
    assert len(next(engine.predict(engine.loaders.test["a"]))) == 4  # type: ignore[index]


def test_a_data_set_that_was_not_loaded_is_not_replaced_by_that_of_the_test(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.batches.use(Loaders(test=batches(1)))
    missing: Any = engine.loaders.val
    with pytest.raises(UserError, match=r"^loader: predict got None.*\n.*splits="):
        list(engine.predict(missing))


def on_unknown(ranks: Distributed, run_dir: str) -> str | None:
    engine = make_engine(Path(run_dir), distributed=ranks)
    with pytest.raises(UserError, match="does not say which samples each of 2 processes gets") as caught:
        list(engine.predict(batches(2)))
    return caught.value.remedy


def test_ranks_whose_samples_are_not_known_are_refused(tmp_path: Path) -> None:
    assert on_ranks(2, on_unknown, str(tmp_path)) == ["Use distributed.nproc_per_node=1."] * 2
