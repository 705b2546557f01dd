"""MessageHub: mmengine's message hub, on `engine.messages` and without its host syncs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hydraloop.compat.facade import Context, Facade


class Scalar(Facade):
    """A scalar's last value: what `get_scalar` returns. Of mmengine's HistoryBuffer, `current` carries over."""

    STANDS_FOR = "mmengine's HistoryBuffer"

    def __init__(self, context: Context, value: float | Tensor) -> None:
        super().__init__(context)
        self.__dict__["_value"] = value

    def current(self) -> float:
        """The last value; a host sync where it is a tensor on a device."""
        return float(self._value)


class MessageHub(Facade):
    """The hub of one engine's adapted hooks.

    Scalars that a hook puts in go into the records as they are called, averaged over the iterations since the last
    record, but those under `val/` and `test/`, which only the hub keeps, and those with a name that hydraloop's own
    numbers have (`epoch`, `loss`, …), which are `<hook>/<name>` there. Without anybody's help there are, as scalars,
    `train/<name>` for the outputs of the last iteration (for hooks with after_train_iter), `train/lr` and
    `val/<metric>`; as information, epoch, iter, max_epochs, max_iters.
    """

    STANDS_FOR = "mmengine's runner.message_hub"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.__dict__.update(_scalars={}, _info={}, _outputs={})

    def see(self, outputs: Mapping[str, Any]) -> None:
        """Keep what the last iteration returned, for `get_scalar`."""
        self.__dict__["_outputs"] = outputs

    # Scalars. ------------------------------------------------------------------------------------------------------

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        """Put a number or scalar tensor in; a tensor stays on its device. `resumed` is without meaning.

        Args:
            count: of how many values it is the sum, as in mmengine: a record has the sum of the values by that of the
                counts, `get_scalar(key).current()` the value itself.
        """
        if isinstance(value, Mapping):
            value, count = value["value"], value.get("count", 1)
        if count < 1:
            raise self.context.no_counterpart(f"count={count} of {self.STANDS_FOR}.update_scalar")
        value = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        self._scalars[key] = value
        if not key.startswith(("val/", "test/")):
            self.context.add(key, value, int(count))

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Put several in."""
        for key, value in log_dict.items():
            self.update_scalar(key, value)

    def get_scalar(self, key: str) -> Scalar:
        """A scalar's last value, as `get_scalar(key).current()`.

        Raises:
            KeyError: there is none of that name.
        """
        found = {**self._known_scalars(), **self._scalars}
        if key not in found:
            raise KeyError(f"{key} is not in the message hub; it has {', '.join(sorted(found)) or 'nothing'}")
        return Scalar(self.context, found[key])

    def _known_scalars(self) -> dict[str, float | Tensor]:
        engine = self._engine
        train = {
            f"train/{name}": value
            for name, value in self._outputs.items()
            if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, int | float)
        }
        validated = {f"val/{name}": value for name, value in engine.metrics.items()}
        return {**train, "train/lr": engine.optimizer.param_groups[0]["lr"], **validated}

    # Information. --------------------------------------------------------------------------------------------------

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Put anything in, for the other adapted hooks. Not saved, `resumed` is without meaning."""
        self._info[key] = value

    def update_info_dict(self, info_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Put several in."""
        self._info.update(info_dict)

    def get_info(self, key: str, default: Any = None) -> Any:
        """What was put in last, or `default`."""
        return self.runtime_info.get(key, default)

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Take something out."""
        return self._info.pop(key, default)

    @property
    def runtime_info(self) -> dict[str, Any]:
        """All of it, with where the run stands."""
        engine = self._engine
        return {
            "epoch": engine.progress.epoch,
            "iter": engine.progress.iteration,
            "max_epochs": engine.max_epochs,
            "max_iters": engine.max_iters,
            **self._info,
        }
