"""Options of the hooks that observe: records, profilers, trackers, and pictures and views of an evaluation."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Union

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hooks import HookConf, store_hooks


@dataclass
class RuntimeInfoHookConf(HookConf):
    """Puts epoch, iteration, lr, momentum, losses and metrics into `engine.messages`."""

    _target_: str = "hydraloop.hooks.RuntimeInfoHook"


@dataclass
class IterTimerHookConf(HookConf):
    """Measures the time of each iteration and its wait for data, estimates the time left, and prints statistics."""

    _target_: str = "hydraloop.hooks.IterTimerHook"


@dataclass
class LoggerHookConf(HookConf):
    """Writes records of the run to the terminal, to `metrics.jsonl` and to trackers."""

    _target_: str = "hydraloop.hooks.LoggerHook"
    interval: Optional[int] = 10
    """Iterations between two records of training. 10, as in MMEngine. A record also closes each epoch, and the
    training. Null: records of validation and test only."""


@dataclass
class ProgressHookConf(HookConf):
    """Shows a progress bar in the terminal."""

    _target_: str = "hydraloop.hooks.ProgressHook"
    on_error: Optional[str] = "warn"
    enabled: Union[bool, str] = "auto"
    """`auto`: only if standard output is a terminal, so that files, pipes and notebooks contain lines only. True:
    always. False: never."""
    refresh_per_second: float = 10
    """Maximum number of updates per second. 10 looks smooth and costs about 1 % of one core."""


@dataclass
class ProfilerHookConf(HookConf):
    """Profiles a few iterations with torch.profiler: a trace file, and a table in the log."""

    _target_: str = "hydraloop.hooks.ProfilerHook"
    on_error: Optional[str] = "warn"
    by_epoch: bool = True
    """Whether `profile_times` counts epochs (MMEngine's default) or iterations."""
    profile_times: int = 1
    """Epochs or iterations after which profiling ends at the latest, at least 1. 1, as in MMEngine: epochs are
    alike."""
    activity_with_cpu: bool = True
    """Record the host's operators. True, as in MMEngine: a trace without them shows no causes."""
    activity_with_cuda: Optional[bool] = None
    """Record the accelerator's kernels. Null: if the run uses one. (MMEngine's default, false, hides them.)"""
    activity_with_npu: Optional[bool] = False
    """Profile with torch_npu.profiler, and record the kernels of an Ascend NPU: true, or null for a run that may use
    the CPU. False: with torch.profiler, which every machine has."""
    schedule: Optional[Dict[str, int]] = field(
        default_factory=lambda: {"wait": 1, "warmup": 1, "active": 3, "repeat": 1, "skip_first": 0}
    )
    """Iterations, as in `torch.profiler.schedule`: leave out `skip_first`, then `repeat` times (0: until the end) leave
    out `wait`, discard `warmup` and record `active`. The first iterations include start-up costs, and three show the
    pattern. Null, MMEngine's default, records everything."""
    on_trace_ready: Any = field(default_factory=lambda: ["tb_trace", "log_trace"])
    """What to do with a trace: `tb_trace`, `chrome_trace`, `log_trace`, or a mapping with `_target_`
    (`[{_target_: …}]`), as a list or one name alone. Null, MMEngine's default: nothing. The default writes a file for
    https://ui.perfetto.dev, and a table to the log for users without a viewer."""
    record_shapes: bool = False
    """Record input shapes. False, as in MMEngine: it makes every operator slower."""
    profile_memory: bool = True
    """Record allocations. True, because memory is often what people profile for. (MMEngine: false.)"""
    with_stack: bool = False
    """Record file and line of each operator. False, as in MMEngine: it is slow and makes large traces."""
    with_flops: bool = False
    """Estimate the FLOPs of matrix products and 2D convolutions. False, as in MMEngine: few users need it."""
    json_trace_path: Optional[str] = None
    """Where in the run directory `chrome_trace` writes: a file that ends in `.json` or `.json.gz`. A path adds
    `chrome_trace` to `on_trace_ready`. Each cycle overwrites the file. Null, as in MMEngine:
    `tf_tracing_logs/chrome_trace.json` if `chrome_trace` is used."""
    row_limit: int = 20
    """Rows of the table, at least 1. 20 fit on a screen."""


@dataclass
class NPUProfilerHookConf(ProfilerHookConf):
    """Profiles a few iterations on Ascend NPUs with torch_npu.profiler."""

    activity_with_npu: Optional[bool] = None
    """Record the NPU's kernels: true, or null for a run that may use the CPU. False: profile with torch.profiler."""
    on_trace_ready: Any = "tb_trace"
    """What to do with a trace: `tb_trace`, `chrome_trace`, or a mapping with `_target_`, as a list or one name alone.
    Null: nothing. The default writes a folder for MindStudio Insight and TensorBoard's Ascend plug-in; torch_npu has
    no table to log."""


@dataclass
class MemoryProfilerHookConf(HookConf):
    """Reports the memory of the machine, the process and the device, in the log and in records."""

    _target_: str = "hydraloop.hooks.MemoryProfilerHook"
    on_error: Optional[str] = "warn"
    interval: int = 50
    """Iterations of training, or batches of an evaluation, between two reports, at least 1. 50, as in MMDetection."""


@dataclass
class _TrackerConf(HookConf):
    """What all trackers have in common."""

    on_error: Optional[str] = "warn"
    interval: int = 1
    """The records of every n-th iteration are sent, at least 1. Records of evaluations, and those of pictures and
    histograms, are always sent. 1: all, because the logger has an interval already."""


@dataclass
class MLflowLoggerHookConf(_TrackerConf):
    """Sends metrics, parameters, config, pictures and system metrics to MLflow; jobs of a sweep share a parent run."""

    _target_: str = "hydraloop.hooks.MLflowLoggerHook"
    tracking_uri: Optional[str] = None
    """`http://…`, `sqlite:///…`, or another address that MLflow accepts. Null: `MLFLOW_TRACKING_URI`, else
    `sqlite:///mlflow.db` in the working directory, MLflow's default, which `mlflow ui` shows there.
    `MLFLOW_EXPERIMENT_NAME` names the experiment; without it, it is `experiment_name`, as for the other trackers."""
    tags: Dict[str, Any] = field(default_factory=dict)
    """Additional tags of the run, by name (`+hooks.mlflow.tags.team=a`). Git commit, command, host, world size and
    versions are always tags. `mlflow.note.content` is the text at the top of its page."""
    system_metrics: bool = True
    """Whether MLflow's own monitor logs CPU, memory, disk, network and GPUs of rank 0's machine, in single runs. True:
    they show why a run is slow. `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` sets the seconds between two points (10)."""
    checkpoints: Optional[str] = None
    """Checkpoint files to store as artifacts at the end of the run: `best`, `last` or `all`. Null: none, because they
    are large and are in the run directory."""
    log_code: bool = False
    """Whether to store `code.patch`, the uncommitted changes of the code. False: no code leaves the machine."""
    flush_timeout: float = 10.0
    """Seconds that sending the rest may take at the end of the run, at least 0. 10: a working server needs less,
    and a broken one should not delay the exit. `hydraloop sync` sends what is left."""


@dataclass
class TensorBoardLoggerHookConf(_TrackerConf):
    """Shows metrics, pictures, the config and a table of hyperparameters in TensorBoard; histograms are an option."""

    _target_: str = "hydraloop.hooks.TensorBoardLoggerHook"
    histograms: Optional[int] = None
    """Iterations between two histograms of each weight and gradient, at least 1. Null: none. Each costs a host sync and
    a copy to the host for each tensor, and about 2 kB per parameter in a file."""
    flush_timeout: float = 10.0
    """Seconds that writing the rest may take at the end of the run, at least 0. 10, as for the other trackers; a
    file needs far less."""


@dataclass
class WandbLoggerHookConf(_TrackerConf):
    """Sends metrics, config, objects and the result to Weights & Biases, or writes files to upload."""

    _target_: str = "hydraloop.hooks.WandbLoggerHook"
    init: Dict[str, Any] = field(default_factory=dict)
    """Further arguments of `wandb.init`, such as `+hooks.wandb.init.project=mine`, `mode`, `entity`, `tags`, `notes`,
    `group`, `name` and `settings`. Without them, W&B's variables (`WANDB_PROJECT`, …) count. Otherwise `project` is
    `experiment_name`, `name` that of the run, and `group` that of the sweep."""
    log_code: bool = False
    """Whether to send `code.patch`, the uncommitted changes of the code. False: no code leaves the machine."""
    checkpoints: Optional[str] = None
    """Checkpoint files to send as artifacts of type model: `best` and `last` at the end of the run, or `all` as they
    are written. The best one has the alias `best`. Null: none, because they are large and W&B's storage is limited."""
    flush_timeout: float = 10.0
    """Seconds that sending the rest may take at the end of the run, at least 0. 10, a short wait;
    `hydraloop sync` sends what is left."""


@dataclass
class TestTimeAugmentationHookConf(HookConf):
    """Tests on the mean over several views of each image; training and validation are unchanged."""

    __test__: ClassVar[bool] = False  # pytest would collect a class whose name begins with Test

    _target_: str = "hydraloop.hooks.TestTimeAugmentationHook"
    transforms: List[Any] = field(default_factory=lambda: ["identity", "hflip"])
    """Views of each image, at least one: `identity`, `hflip`, `vflip`, `rot90`, `rot180`, `rot270`, `shift` (four
    views), and mappings with `_target_`. Each view has the same weight. The default adds the mirror image, as in
    MMPretrain, which means the same for most photographs. It does not for letters and signs, where it makes
    the test worse; use [identity,shift] for these."""
    merge: str = "auto"
    """`probabilities`: the mean of the class probabilities, as in MMPretrain; it is passed on as its logarithm.
    `outputs`: the mean of the outputs, for regression. `auto`: probabilities if the task's loss is torch's
    cross-entropy or NLL, else outputs."""
    shift: int = 1
    """Pixels by which the views of `shift` are moved, at least 1 and less than an image's height and width. 1, so that
    small images stay visible."""


@dataclass
class VisualizationHookConf(HookConf):
    """Draws the first images of each validation and test with their labels and predictions."""

    _target_: str = "hydraloop.hooks.VisualizationHook"
    on_error: Optional[str] = "warn"
    interval: int = 1
    """Draws images from every `interval`-th batch of an evaluation, at least 1, until the picture is full. 1, as in
    MMEngine: the first batches."""
    num_images: int = 32
    """Maximum number of images in a picture, at least 1. 32 small images fill a screen, in a file of about 50 kB."""
    size: int = 128
    """Pixels of an image's longer side in the picture, at least 1. At 128, single pixels of a small image are
    visible and photographs are recognisable."""


def register(store: ConfigStore) -> None:
    """Store them in the groups `default_hooks` and `hooks`."""
    store_hooks(
        store,
        "default_hooks",
        runtime_info=RuntimeInfoHookConf,
        timer=IterTimerHookConf,
        logger=LoggerHookConf,
        progress=ProgressHookConf,
    )
    store_hooks(
        store,
        profiler=ProfilerHookConf,
        npu_profiler=NPUProfilerHookConf,
        memory_profiler=MemoryProfilerHookConf,
        mlflow=MLflowLoggerHookConf,
        tensorboard=TensorBoardLoggerHookConf,
        wandb=WandbLoggerHookConf,
        tta=TestTimeAugmentationHookConf,
        visualization=VisualizationHookConf,
    )
