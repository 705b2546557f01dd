"""Contents of TensorBoard's HPARAMS tab: which options of a run are hyperparameters, and the summaries for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hydraloop.safety.secrets import mask_overrides
from hydraloop.tracking.tracker import Finish, Run, valid_utf8

Value = str | int | float | bool | None

WELL_KNOWN = (
    "seed",
    "task.model._target_",
    "optimizer._target_",
    "optimizer.lr",
    "optimizer.weight_decay",
    "data.loader.batch_size",
    "precision.name",
)
"""Shown for every run, so that runs of different command lines can be compared: these options affect the result."""
_NO_HYPERPARAMETERS = frozenset({"resume", "load_from", "resume_strict"})
"""Overrides that say where a run starts, which are not hyperparameters."""


def chosen(run: Run, wanted: Sequence[str] | None) -> dict[str, Value]:
    """Return the options that are a run's hyperparameters.

    Args:
        run: the run. The typed overrides are read from its `.hydra/overrides.yaml`.
        wanted: keys, or the first parts of keys. None: the typed keys, the sweep's axes and `WELL_KNOWN`. The whole
            config would be about 150 columns, nearly all of them equal in every run.
    """
    params, typed = run.attempts[0].params, _typed(run.run_dir)
    if wanted is None:
        axes = () if run.sweep is None else run.sweep.axes
        keys = dict.fromkeys([*axes, *typed, *(key for key in WELL_KNOWN if key in params)])
    else:
        known = dict.fromkeys([*params, *typed])
        keys = {key: None for key in known if any(f"{key}.".startswith(f"{start}.") for start in wanted)}
    # The choice of a group (`model=gpt`, `hooks=[ema]`) is not in the config: its typed value is shown.
    found = {key: params[key] if key in params else typed[key] for key in keys if key in params or key in typed}
    return {valid_utf8(key): valid_utf8(value) if isinstance(value, str) else value for key, value in found.items()}


def _typed(run_dir: Path) -> dict[str, str]:
    """Return the overrides of the command line, with secrets masked: `{"hooks": "[ema]", "optimizer.lr": "0.1"}`."""
    try:
        lines = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):  # the run was started from Python
        return {}
    found = {}
    for line in mask_overrides([str(line) for line in lines or []]):
        key, _, value = line.partition("=")
        name = key.lstrip("+~")
        if name not in _NO_HYPERPARAMETERS:
            found[name] = "removed" if key.startswith("~") else value
    return found


def session_start(run: Run, params: Mapping[str, Value]) -> Any:
    """Return the summary value with a run's hyperparameters: numbers, booleans and text. None becomes `null`."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo(start_time_secs=run.attempts[0].began)
    for name, value in params.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = "null" if value is None else value
    return _value(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info))


def experiment(run: Run, params: Mapping[str, Value], metrics: Iterable[str]) -> Any:
    """Return the summary value with the columns of the table: the hyperparameters, then `metrics`.

    Without it, TensorBoard would treat every scalar as a metric and show the first five. Swept keys come first.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    axes = () if run.sweep is None else run.sweep.axes
    found = api_pb2.Experiment(
        time_created_secs=run.attempts[0].began,
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=_type(value), differs=name in axes) for name, value in params.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=valid_utf8(tag))) for tag in metrics],
    )
    return _value(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=found))


def session_end(finish: Finish, ended: float) -> Any:
    """Return the summary value that says how a run ended."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if finish.exit_code == 0 else api_pb2.STATUS_FAILURE
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
    return _value(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _type(value: Value) -> Any:
    from tensorboard.plugins.hparams import api_pb2

    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_FLOAT64 if isinstance(value, int | float) else api_pb2.DATA_TYPE_STRING


def _value(tag: str, content: Any) -> Any:
    """Do what `tensorboard.plugins.hparams.summary` does, which needs TensorFlow."""
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata

    return summary_pb2.Summary.Value(
        tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR
    )
