"""Contents of TensorBoard's HPARAMS tab: which options of a run are hyperparameters, and the summaries for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2 as api
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

from hydraloop.tracking.description import override_values
from hydraloop.tracking.tracker import Finish, Run, valid_utf8

Value = str | int | float | bool

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
_NO_HYPERPARAMETERS = ("resume", "load_from", "resume_strict")
"""They say where a run starts."""


def chosen(run: Run, wanted: Sequence[str] | None) -> dict[str, Value]:
    """Return the options that are a run's hyperparameters.

    Args:
        run: the run.
        wanted: keys, or the first parts of keys. None: the typed keys, the sweep's axes and `WELL_KNOWN`. The whole
            config would be about 150 columns, nearly all of them equal in every run.
    """
    typed = {key: value or "removed" for key, value in override_values(run.run_dir).items()}
    # The choice of a group (`model=gpt`, `hooks=[ema]`) is not in the config: its typed value is shown.
    params = {**typed, **run.attempt.params}
    if wanted is None:
        keys = dict.fromkeys([*(() if run.sweep is None else run.sweep.axes), *typed, *WELL_KNOWN])
    else:
        keys = {key: None for key in params if any(f"{key}.".startswith(f"{start}.") for start in wanted)}
    found = {valid_utf8(key): params[key] for key in keys if key in params and key not in _NO_HYPERPARAMETERS}
    shown = {key: "null" if value is None else value for key, value in found.items()}
    return {key: valid_utf8(value) if isinstance(value, str) else value for key, value in shown.items()}


def session_start(run: Run, params: Mapping[str, Value]) -> Summary.Value:
    """Return the summary value with a run's hyperparameters: numbers, booleans and text."""
    info = SessionStartInfo(start_time_secs=run.attempts[0].began)
    for name, value in params.items():
        setattr(info.hparams[name], _type(value)[0], value)
    return _value(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))


def experiment(run: Run, params: Mapping[str, Value], metrics: Iterable[str]) -> Summary.Value:
    """Return the summary value with the columns of the table: the hyperparameters, then `metrics`.

    Without it, TensorBoard would treat every scalar as a metric and show the first five. Swept keys come first.
    """
    axes = () if run.sweep is None else run.sweep.axes
    options = [api.HParamInfo(name=name, type=_type(value)[1], differs=name in axes) for name, value in params.items()]
    tags = [api.MetricInfo(name=api.MetricName(tag=valid_utf8(tag))) for tag in metrics]
    found = api.Experiment(time_created_secs=run.attempts[0].began, hparam_infos=options, metric_infos=tags)
    return _value(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=found))


def session_end(finish: Finish, ended: float) -> Summary.Value:
    """Return the summary value that says how a run ended."""
    status = api.STATUS_SUCCESS if finish.exit_code == 0 else api.STATUS_FAILURE
    info = SessionEndInfo(status=status, end_time_secs=ended)
    return _value(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))


def _type(value: Value) -> tuple[str, Any]:
    """Return a value's field in the list of hyperparameters, and its type in the table."""
    if isinstance(value, bool):
        return "bool_value", api.DATA_TYPE_BOOL
    return (
        ("number_value", api.DATA_TYPE_FLOAT64)
        if isinstance(value, int | float)
        else ("string_value", api.DATA_TYPE_STRING)
    )


def _value(tag: str, content: HParamsPluginData) -> Summary.Value:
    """Do what `tensorboard.plugins.hparams.summary` does, which needs TensorFlow."""
    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
