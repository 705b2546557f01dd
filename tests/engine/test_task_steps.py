"""Tasks with steps: gradients are those of the full batch with any number of ranks, and what runs do not allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn, optim
from torch.nn import functional

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.precision import make_precision
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import DistSamplerSeedHook, EMAHook, FreezeHook, GradClipHook, RuntimeInfoHook
from hydraloop.tasks import Task
from hydraloop.tasks.building import prepare_model
from tests.helpers import EngineWithNeededHooks, at, batches, make_engine, tiny_task
from tests.ranks import RankError, on_ranks

STEPS = ("discriminator", "generator")


class Gan(Task):
    """A generator of vectors [3] from the first two numbers of each sample, and a discriminator."""

    steps = STEPS
    overflows_at = -1
    """The iteration in which the generator's loss is infinite."""

    def forward(self, batch: Any, step: str | None = None) -> dict[str, Any]:
        """Return the loss of a step; without one, that of the discriminator."""
        real, _ = batch
        model: Any = self.model
        fake = model["generator"](real[:, :2])
        if step == "generator":
            loss = functional.softplus(-model["discriminator"](fake)).mean()
            return {"loss": loss * torch.inf if self.engine.progress.iteration == self.overflows_at else loss}
        scores = model["discriminator"](real), model["discriminator"](fake)
        return {
            "loss": (functional.softplus(-scores[0]) + functional.softplus(scores[1])).mean(),
            "real": scores[0].mean(),
        }

    def reset_metrics(self) -> None:
        """There is no evaluation here."""


class Counted(Gan):
    """Returns the sum and the number of the losses."""

    def forward(self, batch: Any, step: str | None = None) -> dict[str, Any]:
        """As in `Gan`."""
        outputs, samples = super().forward(batch, step), len(batch[0])
        return {"loss": (outputs["loss"] * samples if samples else outputs["loss"].nan_to_num(), samples)}


class HalfUsed(Gan):
    """The generator's loss does not depend on its bias."""

    def forward(self, batch: Any, step: str | None = None) -> dict[str, Any]:
        """As in `Gan`."""
        if step != "generator":
            return super().forward(batch, step)
        model: Any = self.model
        return {"loss": model["discriminator"](batch[0][:, :2] @ model["generator"].weight.T).mean()}


def networks() -> nn.ModuleDict:
    """The same each time."""
    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return nn.ModuleDict({"generator": nn.Linear(2, 3), "discriminator": discriminator})


def optimizers(model: nn.ModuleDict) -> dict[str, optim.Optimizer]:
    """One for each network, of two kinds."""
    return {
        "generator": optim.SGD(model["generator"].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        "discriminator": optim.AdamW(model["discriminator"].parameters(), lr=0.05),
    }


def gan_engine(
    run_dir: Path, hooks: dict[str, Any], *, batch_size: int = 6, samples: int = 17, task: type[Gan] = Gan,
    distributed: Distributed | None = None, precision: str = "fp32", **settings: Any,
) -> Engine:  # fmt: skip
    distributed = distributed or Distributed()
    gan = task(networks())
    if distributed.rank:  # the engine gives each rank the weights of rank 0
        nn.init.zeros_(gan.model["generator"].weight)  # type: ignore[index,arg-type]
    generator = torch.Generator().manual_seed(1)
    data = InMemoryDataset(torch.randn(samples, 3, generator=generator), torch.zeros(samples, 1))
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    scale = {"init_scale": 1024.0} if precision == "fp16" else {}
    return make_engine(
        run_dir,
        {"sampler_seed": DistSamplerSeedHook(), **hooks},
        train=build_loader(data, shuffle=True, seed=3, batch_size=batch_size, **part),
        task=gan,
        optimizer=OptimizerSet(optimizers(gan.model)),
        distributed=distributed,
        precision=make_precision({"name": precision, **scale}, torch.device("cpu")),
        **{"max_epochs": 2, **settings},
    )


Gradients = list[tuple[str, dict[str, Tensor]]]


def train(distributed: Distributed, run_dir: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank. Return the gradients before each step, the weights, and the outputs of each iteration."""
    gradients: Gradients = []
    outputs: list[dict[str, float]] = []

    def look(engine: Engine) -> None:
        assert engine.stepper.optimizer is engine.run.optimizers[engine.stepper.task_step]
        gradients.append(
            (
                engine.stepper.task_step,
                {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None},
            )
        )

    hooks = {"look": at("before_optimizer_step", look, nth=0), "read": _Outputs(outputs), **options.pop("hooks", {})}
    engine = gan_engine(Path(run_dir), hooks, distributed=distributed, **options)
    engine.train()
    assert (engine.stepper.task_step, engine.stepper.optimizer) == ("", engine.optimizer)
    return {
        "gradients": gradients,
        "weights": {name: value.clone() for name, value in engine.model.state_dict().items()},
        "steps": engine.progress.optimizer_step,
        "samples": engine.progress.samples,
        "outputs": outputs,
        "skipped": engine.run.precision.skipped,
    }


class _Outputs(Hook):
    """Keeps the outputs of each iteration as numbers."""

    def __init__(self, kept: list[dict[str, float]]) -> None:
        self._kept = kept

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        """Keep them."""
        self._kept.append({name: float(torch.as_tensor(value).detach()) for name, value in outputs.items()})


def by_hand(run_dir: str, options: dict[str, Any]) -> tuple[Gradients, dict[str, Tensor]]:
    """Train as a script would: backward for the networks of a step only, on the whole batches. No ranks."""
    engine = gan_engine(Path(run_dir), {}, **options)  # for its batches only
    task, every = Gan(networks()), options.get("every", {})
    task.engine = engine
    model: Any = task.model
    made, gradients, iteration = optimizers(model), Gradients(), 0
    for epoch in range(2):
        engine.loaders.train.set_epoch(epoch)  # type: ignore[union-attr]
        for batch in engine.loaders.train or ():
            iteration += 1
            for step in STEPS:
                if iteration % every.get(step, 1):
                    continue
                named = {f"{step}.{name}": parameter for name, parameter in model[step].named_parameters()}
                found = torch.autograd.grad(task(batch, step)["loss"], list(named.values()))
                gradients.append((step, dict(zip(named, found, strict=True))))
                for parameter, gradient in zip(named.values(), found, strict=True):
                    parameter.grad = gradient.clone()
                made[step].step()
    return gradients, model.state_dict()


def assert_as_by_hand(found: dict[str, Any], expected: tuple[Gradients, dict[str, Tensor]]) -> None:
    """Compare gradients of each step and weights to 1e-6."""
    assert [step for step, _ in found["gradients"]] == [step for step, _ in expected[0]]
    for (_, one), (_, other) in zip(found["gradients"], expected[0], strict=True):
        assert one.keys() == other.keys()  # those of this step's optimizer only
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)
    for name, value in expected[1].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},  # the last global batch has 5 samples
        {"samples": 13},  # it has 1, so the other rank has none
        {"samples": 13, "task": Counted},
        {"every": {"generator": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradients_of_each_optimizer_are_those_of_the_full_batch(
    world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = by_hand(str(tmp_path), options)
    if world_size == 1:
        results = [train(Distributed(), str(tmp_path), options)]
    else:
        results = on_ranks(2, train, str(tmp_path), {**options, "batch_size": 3})
    for found in results:
        assert_as_by_hand(found, expected)
        assert (found["steps"], found["samples"]) == (6, 2 * options.get("samples", 17))
    first = results[0]["outputs"][0]
    steps = [step for step in STEPS if f"{step}/loss" in first]
    assert steps == (["discriminator"] if "every" in options else list(STEPS))
    assert first["loss"] == pytest.approx(sum(first[f"{step}/loss"] for step in steps))
    assert "discriminator/real" in first or "task" in options


class Terms(Gan):
    """Counts other numbers of terms in each batch and step, and keeps the sums and counts."""

    def forward(self, batch: Any, step: str | None = None) -> dict[str, Any]:
        """As in `Gan`."""
        outputs, count = super().forward(batch, step), int((batch[0] > 0).sum()) * (1 + (step == "generator"))
        total = outputs["loss"] * count
        self.seen.setdefault(step, []).append((total.item(), count))
        return {"loss": (total, count)}


def test_the_recorded_loss_of_a_step_is_the_mean_over_its_terms(tmp_path: Path) -> None:
    engine = gan_engine(tmp_path, {"runtime_info": RuntimeInfoHook()}, task=Terms)
    engine.task.seen = {}
    engine.train()
    means = engine.messages.means()
    for step in STEPS:
        totals, counts = zip(*engine.task.seen[step], strict=True)
        assert len(set(counts)) > 1
        assert means[f"{step}/loss"] == pytest.approx(sum(totals) / sum(counts), rel=1e-6)


def freezing() -> dict[str, Any]:
    """Freeze a layer of the discriminator for the run, and the whole generator for two iterations."""
    late, early = FreezeHook(modules=["discriminator.0"]), FreezeHook(modules=["generator"], iters=2)
    return {"hooks": {"late": late, "early": early, "clip": GradClipHook(max_norm=1.0), "ema": EMAHook()}}


def train_frozen(distributed: Distributed, run_dir: str, batch_size: int) -> dict[str, Any]:
    """Train with `freezing`."""
    return train(distributed, run_dir, {**freezing(), "batch_size": batch_size})


def test_frozen_parameters_stay_frozen_and_a_frozen_step_is_skipped(tmp_path: Path) -> None:
    found = train_frozen(Distributed(), str(tmp_path), 6)
    assert [step for step, _ in found["gradients"]] == ["discriminator"] * 2 + list(STEPS) * 4
    before = networks().state_dict()
    for name, value in found["weights"].items():
        assert torch.equal(value, before[name]) is name.startswith("discriminator.0"), name
    for one in on_ranks(2, train_frozen, str(tmp_path), 3):
        for name, value in found["weights"].items():
            torch.testing.assert_close(one["weights"][name], value, rtol=0, atol=1e-6)


class Logging(Gan):
    """Logs a value with the same name in each step."""

    def forward(self, batch: Any, step: str | None = None) -> dict[str, Any]:
        self.log("half", 0.5 * (step == "generator"))
        return super().forward(batch, step)


def test_values_that_steps_log_with_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    engine = gan_engine(tmp_path, {}, task=Logging)
    engine.train()
    assert engine.task.logged == {"discriminator/half": 0.0, "generator/half": 0.5}


@pytest.mark.parametrize("world_size", [1, 2])
def test_with_fp16_each_optimizer_skips_its_own_overflow(world_size: int, tmp_path: Path) -> None:
    options = {"task": Overflowing, "precision": "fp16", "batch_size": 6 // world_size}
    expected = by_hand(str(tmp_path), {})[0]
    results = (
        on_ranks(2, train, str(tmp_path), options)
        if world_size == 2
        else [train(Distributed(), str(tmp_path), options)]
    )
    for found in results:
        assert (found["skipped"], found["steps"]) == (1, 6)
        gradients = dict(enumerate(found["gradients"]))
        for index in (0, 1, 2):  # until the overflow in the generator's second step
            for name, value in gradients[index][1].items():
                torch.testing.assert_close(value, expected[index][1][name], rtol=0, atol=2e-3)
        assert not gradients[3][1]["generator.weight"].isfinite().all()
        assert all(value.isfinite().all() for value in found["weights"].values())


class Overflowing(Gan):
    """With one infinite loss."""

    overflows_at = 1


def test_on_ranks_a_parameter_that_no_loss_uses_is_an_error_or_left_out(tmp_path: Path) -> None:
    options = {"task": HalfUsed, "batch_size": 3}
    with pytest.raises(RankError, match=r"the loss of the step 'generator' does not depend on model\.generator\.bias"):
        on_ranks(2, train, str(tmp_path), options)
    expected = train(Distributed(), str(tmp_path), {"task": HalfUsed})
    for found in on_ranks(2, train, str(tmp_path), options, find_unused_parameters=True):
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6)
    assert torch.equal(expected["weights"]["generator.bias"], networks().state_dict()["generator.bias"])


class _Swapped(Gan):
    def forward(self, batch: Any, step: str | None = None) -> dict[str, Any]:
        outputs = super().forward(batch, step)
        return {"loss": self.model["discriminator"](batch[0]).mean()} if step == "generator" else outputs  # type: ignore[index, operator]


def test_a_loss_without_gradients_is_refused(tmp_path: Path) -> None:
    problem = "the loss of _Swapped in the step 'generator' does not depend on the parameters of optimizer.generator"
    with pytest.raises(UserError, match=problem):
        gan_engine(tmp_path, {}, task=_Swapped).train()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"accumulate": 2}, "engine.accumulate"),
        ({"every": {"generator": 0}}, "optimizer.generator.every"),
    ],
)
def test_options_that_steps_do_not_allow(settings: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        gan_engine(tmp_path, {}, **settings)
    assert caught.value.key == key


class _Sharded(Distributed):
    sharded, world_size = True, 2


def test_fsdp2_is_refused_before_the_model_is_sharded() -> None:
    cfg = OmegaConf.create({"engine": {}})
    with pytest.raises(UserError, match="FSDP2") as caught:
        prepare_model(cfg, Gan(networks()), torch.device("cpu"), _Sharded())
    assert caught.value.key == "distributed.strategy"


@pytest.mark.parametrize("names", [{}, {"generator": 0}, {"generator": 0, "discriminator": 1, "encoder": 2}], ids=str)
def test_steps_and_optimizers_have_the_same_names(names: dict[str, int], tmp_path: Path) -> None:
    model = nn.ModuleDict({"generator": nn.Linear(2, 3), "discriminator": nn.Linear(2, 3), "encoder": nn.Linear(2, 3)})
    made: Any = {name: optim.SGD(model[name].parameters()) for name in names}
    optimizer = OptimizerSet(made) if made else optim.SGD(model.parameters())
    with pytest.raises(UserError, match="Gan has the steps discriminator, generator") as caught:
        make_engine(tmp_path, task=Gan(model), optimizer=optimizer)
    assert caught.value.key in ("optimizer.generator", "optimizer.discriminator", "optimizer.encoder")


def test_an_optimizer_pauses_only_in_steps(tmp_path: Path) -> None:
    task = tiny_task()
    optimizer = optim.SGD(task.parameters())
    with pytest.raises(UserError, match="the task has no steps") as caught:
        EngineWithNeededHooks(
            task=task, optimizer=optimizer, loaders=Loaders(batches(2)), settings=Settings(every={"": 2})
        )
    assert caught.value.key == "optimizer.every"


class _Number(Gan):
    steps = 1000  # type: ignore[assignment]  # of a diffusion


def test_steps_are_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is 1000, not a tuple") as caught:
        gan_engine(tmp_path, {}, task=_Number)
    assert caught.value.key == "task"
