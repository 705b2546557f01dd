"""For tests of the engine: a tiny task, batches, an engine, and hooks that act, fail or record."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hydraloop.engine.checkpoint.format import load
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import MOUNT_POINTS, Hook
from hydraloop.engine.hook_order import Slot
from hydraloop.engine.loaders import Loaders, epoch_setters
from hydraloop.engine.precision import Precision
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import DistSamplerSeedHook, ParamSchedulerHook
from hydraloop.tasks.task import Task

Batch = tuple[Tensor, Tensor]


def logged(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log without their time; each must have one."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(record.pop("timestamp") > 0 for record in records)
    return records


def batches(count: int, size: int = 4, *, last: int | None = None, seed: int = 0) -> list[Batch]:
    """Make `count` batches of inputs `[size, 3]` and targets `[size, 1]`; the last one has `last` samples."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [size if last is None else last]
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def tiny_task(seed: int = 0) -> Task:
    """Make a linear model `[N, 3] -> [N, 1]` with the mean squared error, initialized by `seed`."""
    model = nn.Linear(3, 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Task(model, nn.MSELoss())


class EngineWithNeededHooks(Engine):
    """An engine with the hooks that the builder adds: `sampler_seed`, and with schedules `param_scheduler`."""

    def __init__(self, *, loaders: Loaders, hooks: Mapping[str, Any] | None = None, **parts: Any) -> None:
        needed: dict[str, Any] = {"sampler_seed": DistSamplerSeedHook} if epoch_setters(loaders.train) else {}
        if parts.get("schedules"):
            needed["param_scheduler"] = ParamSchedulerHook
        hooks = dict(hooks or {})
        for name, cls in needed.items() if parts.get("optimizer") is not None else ():
            hooks.setdefault(name, cls())
        super().__init__(loaders=loaders, hooks=hooks, **parts)


def make_engine(
    run_dir: Path,
    hooks: Mapping[str, Hook | None] | None = None,
    *,
    train: Any = None,
    val: Any = None,
    test: Any = None,
    loaders: Loaders | None = None,
    task: nn.Module | None = None,
    lr: float = 0.01,
    engine: type[Engine] = EngineWithNeededHooks,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    distributed: Distributed | None = None,
    schedules: Mapping[str, Any] | None = None,
    slots: Sequence[Slot] | None = None,
    precision: Precision | None = None,
    **settings: Any,
) -> Engine:
    """Make an engine on the CPU with a tiny task, SGD and, by default, two train batches.

    Args:
        loaders: in place of `train`, `val` and `test`.
    """
    task = tiny_task() if task is None else task
    return engine(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=lr) if optimizer is None else optimizer,
        loaders=loaders or Loaders(batches(2) if train is None else train, val, test),
        schedules=schedules,
        slots=slots,
        precision=precision,
        hooks=hooks,
        settings=Settings(**{"device": "cpu", "max_epochs": 1, **settings}),
        run_dir=run_dir,
        seed=seed,
        distributed=distributed,
    )


def summary(engine: Engine, seconds: float | None = None) -> str:
    """Return the text after a run; `seconds` is its time, by default that of the result."""
    of_result = 0.0 if engine.outcome.result is None else engine.outcome.result.seconds
    return engine.outcome.report.end(engine.outcome.result, engine.error, of_result if seconds is None else seconds)


class Recorder(Hook):
    """Records every call of a mount point; iterations with their `batch_idx`: `before_train_iter 0`.

    Args:
        trace: the list to append to; a new one by default. Several recorders may share one.
        label: a prefix of each entry.
    """

    def __init__(self, trace: list[str] | None = None, label: str = "") -> None:
        self.trace: list[str] = [] if trace is None else trace
        self.label = label
        self.arguments: list[tuple[str, tuple[Any, ...]]] = []


def _recording(point: str) -> Callable[..., None]:
    def method(self: Recorder, engine: Engine, *arguments: Any) -> None:
        batch_idx = f" {arguments[0]}" if arguments and isinstance(arguments[0], int) else ""
        self.trace.append(f"{self.label}{point}{batch_idx}")
        self.arguments.append((point, arguments))

    return method


for _point in MOUNT_POINTS:
    setattr(Recorder, _point, _recording(_point))


class At(Hook):
    """Base class of the hooks that `at` makes; `at` adds the mount point to a subclass, as the call table needs."""

    act: Callable[[Engine], object]
    nth = 1
    calls = 0


def at(point: str, act: Callable[[Engine], object], *, nth: int = 1, **attributes: Any) -> Hook:
    """Make a hook that calls `act(engine)` at the `nth` call of `point` (0: at every call).

    Args:
        attributes: class attributes: `priority`, `on_error`, `rank_zero_only`.
    """

    def method(self: At, engine: Engine, *arguments: Any) -> None:
        self.calls += 1
        if nth in (0, self.calls):
            act(engine)

    made = type("At", (At,), {point: method, **attributes})
    hook: Hook = made()
    return hook


def failing(point: str, error: BaseException | None = None, *, nth: int = 1, **attributes: Any) -> Hook:
    """Make a hook that raises at the `nth` call of `point`, by default `RuntimeError("on purpose")`."""

    def act(engine: Engine) -> None:
        raise RuntimeError("on purpose") if error is None else error

    return at(point, act, nth=nth, **attributes)


class HostSyncs(TorchFunctionMode):
    """Counts the calls that would make the host wait if the tensors were on a device."""

    NAMES = frozenset({"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"})

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the places where two nested values (dicts, lists, tensors to the last bit) differ."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield where
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in one.keys() | other.keys():
            if name not in one or name not in other:
                yield f"{where}[{name!r}] is only in one"
            else:
                yield from differences(one[name], other[name], f"{where}[{name!r}]")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} entries"
        for index, (first, second) in enumerate(zip(one, other, strict=False)):
            yield from differences(first, second, f"{where}[{index}]")
    elif type(one) is not type(other) or one != other:
        yield f"{where}: {one!r} and {other!r}"


def converted(path: Path) -> Path:
    """The file that the command in the message about a file with other objects writes."""
    with pytest.raises(UserError, match="more than tensors and plain values") as caught:
        load(path, key="init.checkpoint")
    name, _, command = str(caught.value.remedy).partition("and use ")[2].partition(": ")
    *_, code, old, new = shlex.split(command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", old, new])
        exec(code, {})  # as `python -c` does, without importing torch again
    return path.with_name(name)
