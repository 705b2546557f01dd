"""What is done to a model before the optimizer sees it: compiled, recomputed, laid out channels last."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.model_preparation import checkpoint_activations, compile_modules, modules_of, use_channels_last
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import (
    CheckpointHook,
    DistSamplerSeedHook,
    EMAHook,
    GradClipHook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
)
from hydraloop.tasks import Regression
from tests.helpers import EngineWithNeededHooks, batches, make_engine


class Block(nn.Module):
    """A layer with dropout that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.forwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """`[N, 3]` to `[N, 3]`."""
        self.forwards += 1
        return nn.functional.dropout(self.layer(inputs).tanh(), 0.5, self.training)


class Net(nn.Module):
    """Two layers with dropout, in a class of its own, which torch compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Linear(3, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """`[N, 3]` to `[N, 1]`."""
        outputs: Tensor = self.layers(inputs)
        return outputs


def network() -> nn.Sequential:
    """Two blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(3, 1))


def forwards_of(model: nn.Module) -> list[int]:
    """How many forwards each block has done."""
    return [module.forwards for module in model.modules() if isinstance(module, Block)]


def engine_for(model: nn.Module, run_dir: Path, hooks: dict[str, Any], **settings: Any) -> Engine:
    """An engine over twelve batches of the same size and two to validate on."""
    task = Regression(model, nn.MSELoss())
    return make_engine(
        run_dir,
        hooks,
        train=batches(12),
        val=batches(2),
        task=task,
        optimizer=torch.optim.AdamW(task.parameters(), lr=0.01),
        **{"max_epochs": 2, **settings},
    )


def all_hooks() -> dict[str, Any]:
    """The default hooks that touch what is computed, and ema."""
    return {
        "runtime_info": RuntimeInfoHook(),
        "timer": IterTimerHook(),
        "sampler_seed": DistSamplerSeedHook(),
        "grad_clip": GradClipHook(max_norm=1.0),
        "logger": LoggerHook(),
        "param_scheduler": ParamSchedulerHook(),
        "ema": EMAHook(),
        "checkpoint": CheckpointHook(),
    }


# Compiling. ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Any:
    """torch's compiler with nothing remembered."""
    import torch._dynamo

    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_hooks_never_cause_a_recompile(compiler: Any, tmp_path: Path) -> None:
    def compilations(hooks: dict[str, Any]) -> int:
        compiler.reset()
        graphs: Counter[str] = Counter()

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            graphs["compiled"] += 1
            return graph.forward

        compile_modules([model := Net()], {"backend": backend})
        engine_for(model, tmp_path, hooks, max_epochs=3).train()
        return graphs["compiled"]

    bare = compilations({})
    assert bare >= 2  # training and evaluation
    assert compilations(all_hooks()) == bare


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_of_a_compiled_run_loads_in_eager_and_back(compiler: Any, tmp_path: Path) -> None:
    def run(compiled: bool, folder: str, **settings: Any) -> Engine:
        model = Net()
        if compiled:
            compile_modules([model], {"backend": "aot_eager"})
        engine = engine_for(model, tmp_path / folder, {"checkpoint": CheckpointHook(), "ema": EMAHook()}, **settings)
        engine.train()
        return engine

    for compiled, folder in ((True, "compiled"), (False, "eager")):
        run(compiled, folder, max_epochs=1)
        saved = tmp_path / folder / "checkpoints" / "epoch_1.pth"
        names = torch.load(saved, weights_only=True)["state_dict"].keys()
        assert list(names) == ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
        engine = run(not compiled, folder, max_epochs=2, resume=saved)
        assert engine.progress.optimizer_step == 24


class OneBuffer:
    """A backend of torch.compile that returns each output in the same memory, as CUDA graphs do."""

    def __init__(self, *, options: object = None, mode: object = None) -> None:
        self._outputs: list[Tensor] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: object) -> Any:
        def call(*args: Any) -> list[Tensor]:
            found = [output.detach() for output in graph(*args)]
            self._outputs = self._outputs or found
            return [kept.copy_(new) for kept, new in zip(self._outputs, found, strict=True)]

        return call


class ReturnsLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """`[N, 3]` and `[N, 1]` to two tensors."""
        outputs = self.layer(inputs)
        return {"loss": (outputs - targets).square().mean(), "outputs": outputs}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({}, False),
    ],
)
@torch.no_grad()
def test_outputs_of_cuda_graphs_outlive_the_next_call(compiler: Any, options: dict[str, Any], copied: bool) -> None:
    compile_modules([model := ReturnsLoss()], {**options, "backend": OneBuffer()})
    first = model(torch.ones(2, 3), torch.zeros(2, 1))
    kept = {name: value.clone() for name, value in first.items()}
    model(torch.ones(2, 3), torch.ones(2, 1))
    assert torch.equal(first["loss"], kept["loss"]) is copied
    assert copy.deepcopy(model)(torch.ones(2, 3), torch.zeros(2, 1))["loss"].equal(kept["loss"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler's own code
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_run_with_cuda_graphs_has_the_losses_of_an_eager_run(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):
        monkeypatch.setenv(name, "")  # the compiler sets it and leaves it; it is removed after the test
        monkeypatch.delenv(name)

    class Losses(Hook):
        def __init__(self) -> None:
            self.kept: list[Tensor] = []

        def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
            self.kept.append(outputs["loss"])

    class OwnLoss(Regression):
        def forward(self, batch: Any) -> dict[str, Any]:
            found = self.model(*batch)
            return {**found, "targets": batch[1]}

    def losses(options: object) -> Tensor:
        torch.manual_seed(0)
        compile_modules([model := ReturnsLoss().cuda()], options)
        engine = EngineWithNeededHooks(
            task=(task := OwnLoss(model)),
            optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
            loaders=Loaders(batches(12), batches(2)),
            hooks={"losses": (hook := Losses())},
            settings=Settings(device="cuda", max_epochs=2),
            run_dir=tmp_path,
        )
        engine.train()
        return torch.stack(hook.kept).cpu()

    torch.testing.assert_close(losses({"mode": mode}), losses(False))


def test_a_bare_sequential_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    compile_modules([nn.Sequential(nn.Linear(3, 1))], {"backend": "eager"})
    assert "does not compile a bare nn.Sequential" in caplog.text


@pytest.mark.parametrize("options", [{"cpp": {"cxx": "evil"}}, {"triton.cudagraphs": True}, ["cpp.cxx", "evil"], {}])
def test_options_that_may_name_a_program_or_a_file(options: object) -> None:
    with pytest.raises(UserError) as caught:
        compile_modules([network()], {"options": options})
    assert caught.value.key == "engine.compile.options"


# Recomputing. --------------------------------------------------------------------------------------------------------


def test_recomputed_activations_give_the_same_gradients_with_dropout() -> None:
    inputs = torch.randn(8, 3, requires_grad=True)

    def gradients(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        model(inputs).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(kept := network())
    checkpoint_activations(recomputed := network(), ["Block"])
    found = gradients(recomputed)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [forwards_of(kept), forwards_of(recomputed)] == [[1, 1], [2, 2]]
    assert recomputed.state_dict().keys() == kept.state_dict().keys()


def test_nothing_is_recomputed_in_evaluation(tmp_path: Path) -> None:
    model = network()
    checkpoint_activations(model, ["Block"])
    engine_for(model, tmp_path, {}).validate()
    assert forwards_of(model) == [3, 3], "one in the sanity step, two in the validation"


def test_a_class_that_does_not_occur() -> None:
    with pytest.raises(UserError, match="Sequential has no module of the class 'Bloc'") as caught:
        modules_of(network(), ["Bloc"], key="distributed.fsdp.wrap")
    assert caught.value.key == "distributed.fsdp.wrap"
    assert "Block" in (caught.value.remedy or "")


def test_inner_modules_come_before_outer_ones() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    found = modules_of(model, ["Linear", "Sequential"], key="key")
    assert found == [model[1], model[0][0], model[0]]  # type: ignore[index]


# Layout. -------------------------------------------------------------------------------------------------------------


class Images(nn.Module):
    """A convolution, which says that it wants its images channels last."""

    channels_last = True

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.layouts: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        """`[N, 3, H, W]` to `[N, 1]`."""
        self.layouts.append(images.is_contiguous(memory_format=torch.channels_last))
        return self.convolution(images).mean((1, 2, 3))[:, None]


@pytest.mark.parametrize(("wanted", "expected"), [("auto", True), (True, True), (False, False)])
def test_channels_last(wanted: object, expected: bool, tmp_path: Path) -> None:
    model = Images()
    names = list(model.state_dict())
    assert use_channels_last(model, wanted) is expected
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last) is expected
    assert list(model.state_dict()) == names
    task = Regression(model, nn.MSELoss())
    images = [(torch.randn(2, 3, 5, 5), torch.randn(2, 1))] * 2
    make_engine(tmp_path, train=images, val=images, task=task, lr=0.1, channels_last=expected).train()
    assert model.layouts == [expected] * 5, "of the sanity step, two iterations and the validation"
