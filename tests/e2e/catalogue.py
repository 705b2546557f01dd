"""Every system of the predecessors' documents: what it is here, commands that run it on the digits, and its tests.

`python -m tests.e2e.catalogue` prints it as Markdown tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """Arguments of `train.py`. The commands of a row run in order, in one folder."""

    line: str
    refused: str | None = None
    """A part of the message if the line is an error on purpose; None: it runs."""


@dataclass(frozen=True)
class Row:
    """A system of the documents."""

    source: str
    """The frameworks that have it."""
    system: str
    """Its name there."""
    option: str
    """What it is here."""
    commands: tuple[Command, ...]
    tests: tuple[str, ...]
    """`file::function`, files relative to `tests/`."""


def _row(source: str, system: str, option: str, *lines: str | Command, tests: str) -> Row:
    """A row. Tests are given one per line; a line without a file means the file of the line before."""
    commands = tuple(line if isinstance(line, Command) else Command(line) for line in lines)
    return Row(source, system, option, commands, tuple(_full_names(tests)))


def _full_names(tests: str) -> Iterator[str]:
    file = ""
    for line in tests.split():
        named, _, function = line.rpartition("::")
        file = named or file
        yield f"{file}::{function}"


MECHANISM = (
    _row(
        "all",
        "base hook class with mount points",
        "`hydraloop.Hook`, 27 mount points",
        "engine.max_epochs=1 +hooks.mine._target_=my_project.hooks.MyHook",
        tests="""
        engine/test_trace.py::test_two_epochs_with_validation_test_checkpoints_and_records
        test_the_arguments_of_every_mount_point
        engine/test_hook.py::test_there_are_27_mount_points_and_four_general_ones
        test_a_misspelt_mount_point_is_refused_when_the_class_is_created
        """,
    ),
    _row(
        "MMClassification, MMDetection",
        "before_run/after_run, before_epoch/after_epoch, before_iter/after_iter; {train,val} epoch/iter",
        "the mount points, and `before_epoch after_epoch before_iter after_iter` with `mode`",
        "engine.max_epochs=1 hooks=[empty_cache]",
        tests="""
        engine/test_hook.py::test_general_points_are_called_at_the_train_val_and_test_points_with_the_mode
        e2e/test_predecessors.py::test_the_general_points_are_called_in_training_validation_and_test
        """,
    ),
    _row(
        "MMEngine",
        "every_n_train_iters, every_n_epochs, every_n_iters, end_of_epoch, is_last_train_iter in a hook",
        "the same methods of `Hook`, on the rule `Every`",
        "engine.max_epochs=2 default_hooks.checkpoint.interval=3 default_hooks.checkpoint.by_epoch=false",
        tests="""
        engine/test_hook.py::test_helpers_say_when_something_is_due
        test_the_helpers_answer_as_mmengines_do
        engine/test_interval.py::test_due_in_the_first_ten
        e2e/test_predecessors.py::test_a_hook_with_mmengines_helper_is_due_as_there
        """,
    ),
    _row(
        "iMIX",
        "6 points, self.trainer proxy, hooks reach each other's data",
        '`engine`, an argument of each point; `engine.hooks["ema"]`; `engine.messages`',
        "engine.max_epochs=1 hooks=[ema]",
        tests="""
        e2e/test_predecessors.py::test_hooks_reach_each_other_through_the_engine
        engine/test_engine.py::test_hooks_know_their_name_and_key
        """,
    ),
    _row(
        "MMEngine",
        "priority HIGHEST 0 … LOWEST 100; int 0..100 or name; NORMAL by default; in config or on the class; "
        "ties keep registration order",
        "`priority`",
        "engine.max_epochs=1 hooks=[ema,profiler] hooks.ema.priority=HIGH hooks.profiler.priority=95",
        tests="""
        engine/test_hook.py::test_the_scale_is_mmengines
        test_numbers_and_names_in_any_case
        engine/test_hook_order.py::test_priority_then_default_before_custom_then_registration
        e2e/test_command_line.py::test_a_priority_is_swept
        e2e/test_predecessors.py::test_a_hook_with_mmengines_helper_is_due_as_there
        """,
    ),
    _row(
        "iMIX",
        "levels HIGHEST HIGHER HIGH NORMAL LOW LOWER LOWEST; a custom hook with the level of a default hook runs "
        "after it",
        "HIGHER and LOWER are VERY_HIGH and VERY_LOW; default hooks are registered first",
        "engine.max_epochs=1 hooks=[profiler] hooks.profiler.priority=LOWER",
        tests="""
        e2e/test_predecessors.py::test_imixs_names_of_priorities
        test_a_custom_hook_runs_after_the_default_hook_of_its_level
        """,
    ),
    _row(
        "MMCV",
        "the execution order of the hooks at each stage is printed before training",
        "at the start; `--dry-run`",
        "--dry-run hooks=[ema,profiler]",
        tests="""
        e2e/test_command_line.py::test_the_dry_runs_order_is_the_runs
        test_torch_is_not_imported_and_nothing_is_written
        cli/test_plan.py::test_the_plan_is_the_order_of_the_engine
        """,
    ),
    _row(
        "MMEngine",
        "default_hooks / custom_hooks; a default hook can be reconfigured",
        "the groups `default_hooks` and `hooks`",
        "engine.max_epochs=2 default_hooks.checkpoint.interval=2",
        "engine.max_epochs=1 default_hooks.checkpoint=null",
        tests="""
        e2e/test_command_line.py::test_a_changed_and_a_removed_default_hook
        e2e/test_predecessors.py::test_a_default_hook_can_be_removed
        """,
    ),
    _row(
        "all",
        "registry and type= strings, custom_imports",
        "`_target_`",
        "engine.max_epochs=1 +hooks.mine._target_=my_project.hooks.MyHook +hooks.mine.digits=2",
        "engine.max_epochs=1 hooks=[weight_norm]",
        tests="""
        e2e/test_command_line.py::test_no_checkpoint_and_a_custom_hook
        test_a_custom_model_and_custom_data
        safety/test_allowlist.py::test_refused
        """,
    ),
    _row(
        "MMEngine",
        "message hub (runtime_info, log buffers)",
        "`engine.messages`, one for each engine",
        "engine.max_epochs=1",
        tests="""
        engine/records/test_messages.py::test_facts_are_read_when_somebody_asks
        test_means_over_floats_and_tensors_and_an_empty_window_afterwards
        e2e/test_predecessors.py::test_the_message_hub_has_runtime_infos_facts
        """,
    ),
    _row(
        "MMClassification",
        "workflow [('train', n), ('val', m)]",
        "`engine.val_interval`, `val_begin`, `val_by_epoch`",
        "engine.max_epochs=2 engine.val_interval=2",
        "engine.max_epochs=1 engine.val_by_epoch=false engine.val_interval=8 engine.val_begin=5",
        tests="""
        e2e/test_predecessors.py::test_the_val_workflow_is_an_interval_and_reports_the_loss
        engine/evaluation/test_evaluation.py::test_validation_is_due_at_the_interval_and_at_the_end
        test_the_loss_is_the_mean_over_samples_not_over_batches
        """,
    ),
    _row(
        "MMClassification",
        "load_from / resume_from / init_cfg.Pretrained (with prefix)",
        "`load_from`, `resume`, `init.checkpoint` and `init.prefix`",
        "engine.max_epochs=1 hydra.run.dir=runs/first",
        "engine.max_epochs=2 hydra.run.dir=runs/first resume=auto",
        "engine.max_epochs=1 load_from=runs/first/checkpoints/epoch_1.pth",
        "engine.max_epochs=1 init.checkpoint=runs/first/checkpoints/epoch_1.pth init.prefix=features.",
        tests="""
        e2e/test_predecessors.py::test_load_from_and_pretrained_with_a_prefix
        e2e/test_command_line.py::test_resuming_the_newest_run_in_its_own_directory
        test_load_from_takes_weights_into_a_new_run
        engine/checkpoint/test_resume.py::test_cut_at_an_epochs_end
        test_cut_inside_an_epoch
        engine/checkpoint/test_initial_weights.py::test_init_with_a_prefix_takes_only_those
        test_init_with_a_prefix_the_model_does_not_have_takes_it_off
        test_init_with_a_prefix_the_file_does_not_have_puts_it_in_front
        """,
    ),
    _row(
        "MMClassification",
        "log_config with interval and several logger hooks; evaluation with metric, metric_options "
        "topk, save_best=True, start",
        "`default_hooks.logger.interval`, `hooks.tensorboard.interval`, `task.metrics`, "
        "`default_hooks.checkpoint.save_best`, `engine.val_begin`",
        "engine.max_epochs=2 default_hooks.logger.interval=5 task.metrics.accuracy.top_k=2 engine.val_begin=2 "
        "default_hooks.checkpoint.save_best=auto",
        "engine.max_epochs=1 +task.metrics.top3._target_=torchmetrics.Accuracy +task.metrics.top3.task=multiclass "
        "+task.metrics.top3.num_classes=10 +task.metrics.top3.top_k=3 default_hooks.checkpoint.save_best=top3",
        tests="""
        e2e/test_predecessors.py::test_log_config_is_the_loggers_interval
        test_evaluation_with_topk_of_torchmetrics_and_the_best_of_it
        test_evaluation_can_start_later_by_epoch_or_iteration
        tasks/test_metrics.py::test_accuracy_by_hand
        hooks/test_tensorboard.py::test_an_interval_sends_every_nth_iteration_and_all_evaluations
        """,
    ),
)

DEFAULT_HOOKS = (
    _row(
        "MMEngine",
        "RuntimeInfoHook",
        "`runtime_info`",
        "engine.max_epochs=1",
        tests="""
        hooks/test_runtime_info.py::test_facts_follow_the_run
        test_momentum_of_any_optimizer
        test_all_scalars_are_averaged
        test_the_losses_are_those_of_the_iteration_just_done
        test_the_best_is_the_first_metrics_in_the_direction_it_declares
        """,
    ),
    _row(
        "MMEngine, iMIX IterationTimerHook",
        "IterTimerHook",
        "`timer`",
        "engine.max_epochs=1",
        tests="""
        hooks/test_timer.py::test_time_and_data_time_of_each_iteration
        test_eta_counts_the_iterations_left
        test_summary
        engine/report/test_summary.py::test_summary_of_a_finished_run
        """,
    ),
    _row(
        "MMEngine",
        "DistSamplerSeedHook",
        "`sampler_seed`",
        "engine.max_epochs=2 distributed.nproc_per_node=2",
        tests="""
        hooks/test_sampler_seed.py::test_real_ranks_shuffle_anew_together
        test_without_the_hook_every_epoch_is_the_same
        test_hydraloops_loader_shuffles_by_seed_and_epoch
        """,
    ),
    _row(
        "MMEngine LoggerHook; MMCV TextLoggerHook; iMIX PeriodicLogger, CommonMetricLoggerHook, JSONLoggerHook",
        "LoggerHook",
        "`logger`",
        "engine.max_epochs=1 default_hooks.logger.interval=5",
        tests="""
        hooks/test_logger.py::test_records_of_a_run
        test_a_train_record_has_everything_in_order
        test_lines_for_people
        test_one_host_sync_a_record
        """,
    ),
    _row(
        "MMEngine ParamSchedulerHook; MMCV LrUpdaterHook, MomentumUpdaterHook; iMIX LRSchedulerHook",
        "ParamSchedulerHook",
        "`param_scheduler`; `scheduler=`constant, linear, step, multistep, exponential, poly, cosine, warmup_cosine, "
        "cosine_restart, onecycle, plateau, momentum",
        "engine.max_epochs=1 scheduler=[warmup_cosine,momentum]",
        "engine.max_epochs=1 scheduler=[linear,multistep]",
        "engine.max_epochs=1 scheduler=onecycle",
        "engine.max_epochs=1 scheduler=[poly,plateau]",
        "engine.max_epochs=1 scheduler=[constant,step,exponential]",
        "engine.max_epochs=1 scheduler=cosine_restart",
        tests="""
        hooks/test_param_scheduler.py::test_a_schedule_steps_after_each_optimizer_step
        test_a_schedule_by_epoch_steps_once_an_epoch
        test_any_key_of_any_number_of_schedules_is_stepped
        test_plateau_follows_the_validation
        test_the_lr_is_summarised_after_training
        optim/test_schedule_values.py::test_an_option_follows_its_formula
        optim/test_schedule_keys.py::test_a_schedule_changes_the_key_it_names_and_no_other
        optim/test_schedule_conversion.py::test_it_is_the_same_curve_in_finer_steps
        """,
    ),
    _row(
        "MMEngine, MMCV, MMClassification CheckpointSaverHook, iMIX CheckPointHook",
        "CheckpointHook",
        "`checkpoint`",
        "engine.max_epochs=3 default_hooks.checkpoint.max_keep_ckpts=2 default_hooks.checkpoint.save_best=auto "
        "default_hooks.checkpoint.published_keys=[meta,state_dict]",
        "engine.max_epochs=1 default_hooks.checkpoint.by_epoch=false default_hooks.checkpoint.interval=5 "
        "default_hooks.checkpoint.save_begin=5 default_hooks.checkpoint.out_dir=elsewhere",
        tests="""
        hooks/test_checkpoint.py::test_files_are_written_when_they_are_due
        test_several_metrics_have_a_best_file_each_and_the_first_is_the_runs
        test_what_is_better
        test_published_files_keep_the_named_entries_with_the_averaged_weights
        test_last_checkpoint_names_the_newest_regular_file
        test_parts_can_be_left_out
        """,
    ),
    _row(
        "iMIX OptimizerHook; MMCV OptimizerHook",
        "clip_grad_norm",
        "`grad_clip`",
        "engine.max_epochs=1 default_hooks.grad_clip.max_norm=1.0",
        "engine.max_epochs=1 default_hooks.grad_clip.clip_value=0.1",
        tests="""
        hooks/test_grad_clip.py::test_the_norm_of_all_gradients_together_is_bounded
        test_single_entries_are_bounded_by_value
        test_the_norm_before_clipping_is_recorded
        test_it_is_off_by_default
        e2e/test_predecessors.py::test_the_record_has_the_norm_before_clipping
        """,
    ),
    _row(
        "iMIX",
        "Fp16OptimizerHook",
        "`precision=fp16`, `precision.loss_scale`",
        "engine.max_iters=3 precision=fp16 default_hooks.grad_clip.max_norm=1.0 hooks=[ema]",
        "engine.max_iters=3 precision=fp16 precision.loss_scale=512",
        tests="""
        engine/device/test_precision.py::test_clipping_sees_gradients_of_true_size
        test_a_fixed_scale_never_changes_and_an_overflow_skips_its_step
        test_the_engine_skips_what_overflows
        hooks/test_ema.py::test_a_step_that_fp16_skips_is_no_update
        hooks/test_param_scheduler.py::test_a_skipped_step_moves_no_schedule
        e2e/test_predecessors.py::test_16_bits_clip_and_record_unscaled_gradients
        """,
    ),
    _row(
        "own",
        "progress bar",
        "`progress`",
        "engine.max_epochs=1 default_hooks.progress.enabled=true",
        tests="""
        hooks/test_progress.py::test_bar_in_a_terminal
        test_without_a_bar_nothing_is_printed
        """,
    ),
)

CUSTOM_HOOKS = (
    _row(
        "MMEngine; iMIX EMAIterHook, EMAEpochHook; MMDet ExpMomentumEMAHook, LinearMomentumEMAHook",
        "EMAHook",
        "`ema`; a formula of the project: `hooks.ema.weight`",
        "engine.max_epochs=1 hooks=[ema]",
        "engine.max_iters=3 hooks=[ema] "
        "hooks.ema.weight={_target_:torch.optim.swa_utils.get_ema_avg_fn,decay:0.9,_partial_:false}",
        "engine.max_epochs=2 hooks=[ema] hooks.ema.ema_type=stochastic hooks.ema.by_epoch=true",
        tests="""
        hooks/test_ema_rules.py::test_each_type_is_its_rule
        test_a_custom_formula_is_the_average
        hooks/test_ema.py::test_training_does_not_notice
        test_evaluation_runs_on_the_average_and_the_raw_bits_come_back
        test_by_epoch_averages_the_ends_of_epochs
        test_a_resumed_run_ends_with_the_same_bits
        """,
    ),
    _row(
        "MMDetection, MMClassification",
        "frozen_stages and norm_eval of backbones",
        "`freeze`",
        "engine.max_epochs=2 hooks=[freeze] hooks.freeze.modules=[features] hooks.freeze.epochs=1",
        tests="""
        hooks/test_freeze.py::test_modules_are_frozen_for_their_time
        test_two_ranks_train_as_one_process_does
        test_a_killed_run_resumes_to_the_same_bits
        test_frozen_norms_keep_their_statistics_unless_told_otherwise
        """,
    ),
    _row(
        "MMEngine",
        "EmptyCacheHook",
        "`empty_cache`",
        "engine.max_epochs=1 hooks=[empty_cache]",
        tests="""
        hooks/test_empty_cache.py::test_by_default_after_each_epoch
        test_before_each_epoch
        test_after_each_iteration
        """,
    ),
    _row(
        "MMEngine",
        "SyncBuffersHook",
        "`sync_buffers`",
        "engine.max_epochs=1 hooks=[sync_buffers,sync_norm] distributed.nproc_per_node=2",
        tests="""
        hooks/test_sync_buffers.py::test_at_each_epochs_end_all_ranks_have_the_mean
        """,
    ),
    _row(
        "MMEngine; iMIX AutogradProfilerHook",
        "ProfilerHook",
        "`profiler`",
        "engine.max_epochs=1 hooks=[profiler] hooks.profiler.on_trace_ready=tb_trace",
        tests="""
        hooks/test_profiler.py::test_by_default_three_iterations_in_a_file_and_a_table
        test_the_chrome_trace_is_at_the_given_path
        """,
    ),
    _row(
        "MMEngine",
        "NPUProfilerHook",
        "`npu_profiler`",
        Command("hooks=[npu_profiler]", refused="torch_npu cannot be imported"),
        tests="""
        hooks/test_profiler_npu.py::test_without_torch_npu_there_is_one_message_before_training
        test_by_default_three_iterations_analysed
        """,
    ),
    _row(
        "iMIX",
        "AutogradAnomalyDetectHook",
        "`anomaly_detection`",
        "engine.max_iters=3 hooks=[anomaly_detection]",
        tests="""
        hooks/test_anomaly_detection.py::test_a_nan_in_the_backward_pass_is_named
        test_the_mode_is_what_it_was
        """,
    ),
    _row(
        "MMEngine",
        "EarlyStoppingHook",
        "`early_stopping`",
        "engine.max_epochs=4 hooks=[early_stopping] hooks.early_stopping.patience=1 hooks.early_stopping.min_delta=0.9",
        tests="""
        hooks/test_early_stopping.py::test_it_stops_at_the_epoch_at_which_mmengine_does
        test_mmengines_own_class_says_the_same
        test_a_resumed_run_stops_at_the_same_epoch
        test_ranks_stop_together
        """,
    ),
    _row(
        "MMEngine",
        "NaiveVisualizationHook",
        "`visualization`",
        "engine.max_epochs=1 hooks=[visualization]",
        tests="""
        hooks/test_visualization.py::test_a_picture_of_each_evaluation_and_its_record
        test_right_and_wrong_are_seen_and_the_pixels_are_the_images
        test_label_and_prediction_are_written_below_by_name
        """,
    ),
    _row(
        "MMEngine",
        "PrepareTTAHook",
        "`tta`",
        "engine.max_epochs=1 hooks=[tta] hooks.tta.transforms=[identity,shift]",
        tests="""
        hooks/test_tta.py::test_the_test_is_that_of_the_mean_and_training_is_as_without
        test_the_model_is_put_back_after_an_error
        """,
    ),
    _row(
        "MMDet, MMEngine's example",
        "CheckInvalidLossHook",
        "`check_invalid_loss`",
        "engine.max_epochs=1 hooks=[check_invalid_loss]",
        Command(
            "engine.max_epochs=1 hooks=[check_invalid_loss] hooks.check_invalid_loss.interval=5 optimizer.lr=1e30",
            refused="the loss is nan at iteration 2, noticed at iteration 5",
        ),
        tests="""
        hooks/test_check_invalid_loss.py::test_the_error_says_where_it_began
        test_any_iteration_is_found_with_its_samples
        test_one_host_sync_an_interval
        """,
    ),
    _row(
        "hydraloop",
        "return to the last checkpoint after a bad loss",
        "`rollback`",
        "engine.max_epochs=2 hooks=[rollback]",
        tests="""
        hooks/test_rollback.py::test_a_bad_batch_is_left_out_to_the_last_bit
        test_all_ranks_go_back_if_one_has_a_bad_loss
        test_what_ends_the_run
        """,
    ),
    _row(
        "MMDet",
        "MemoryProfilerHook",
        "`memory_profiler`",
        "engine.max_epochs=1 hooks=[memory_profiler] hooks.memory_profiler.interval=10",
        tests="""
        hooks/test_memory_profiler.py::test_the_documented_fields_are_in_the_records
        test_one_line_in_the_log_in_mmdetections_words
        """,
    ),
    _row(
        "MMDet",
        "NumClassCheckHook",
        "`num_class_check`",
        "engine.max_epochs=1 hooks=[num_class_check]",
        Command(
            "hooks=[num_class_check] task.model.num_classes=12", refused="it is 12, but Digits of data.train has 10"
        ),
        tests="""
        hooks/test_num_class_check.py::test_another_number_of_classes_is_refused_with_both_numbers_and_where_they_are
        test_the_same_number_passes_without_a_word
        """,
    ),
    _row(
        "MMDet",
        "SetEpochInfoHook",
        "`set_epoch_info`",
        "engine.max_epochs=1 hooks=[set_epoch_info] data=digits_augmented",
        tests="""
        hooks/test_set_epoch_info.py::test_task_model_and_data_set_get_each_epoch_from_0
        test_the_augmentation_of_the_digits_grows
        """,
    ),
    _row(
        "MMDet",
        "SyncNormHook",
        "`sync_norm`",
        "engine.max_epochs=1 hooks=[sync_buffers,sync_norm] distributed.nproc_per_node=2",
        tests="""
        hooks/test_sync_buffers.py::test_statistics_of_layers_have_the_mean_before_each_evaluation
        test_statistics_have_the_mean_before_a_test_where_nothing_was_validated
        """,
    ),
    _row(
        "MMDet",
        "SyncRandomSizeHook",
        "`sync_random_size`",
        "engine.max_epochs=1 hooks=[sync_random_size]",
        tests="""
        hooks/test_sync_random_size.py::test_a_new_size_every_interval_within_the_range_and_in_proportion
        test_the_sizes_are_those_of_seed_and_iteration
        test_all_ranks_have_the_same_sizes
        """,
    ),
    _row(
        "MMDet",
        "YOLOXLrUpdaterHook",
        "`scheduler=yolox`",
        "engine.max_epochs=4 scheduler=yolox scheduler.yolox.num_last_epochs=1",
        tests="""
        optim/test_schedule_values.py::test_an_option_follows_its_formula
        test_ours_stay_at_the_lowest_value
        """,
    ),
    _row(
        "MMDet",
        "YOLOXModeSwitchHook",
        "`mode_switch`",
        "engine.max_epochs=2 data=digits_augmented hooks=[mode_switch] hooks.mode_switch.num_last_epochs=1",
        tests="""
        hooks/test_mode_switch.py::test_exactly_the_last_epochs_are_switched_for_each_loader
        test_persistent_workers_are_started_anew_once
        test_the_augmented_digits_are_the_plain_ones_in_the_last_epochs
        """,
    ),
    _row(
        "MMDet EvalHook, DistEvalHook; MMCV EvaluationHook; iMIX EvaluateHook",
        "EvalHook",
        "the engine's val loop",
        "engine.max_epochs=2 distributed.nproc_per_node=2",
        "engine.max_epochs=2 engine.val_interval=2",
        tests="""
        engine/evaluation/test_evaluation.py::test_validation_is_due_at_the_interval_and_at_the_end
        engine/distributed/test_process_group.py::test_evaluation_counts_every_sample_once
        data/test_rank_shares.py::test_every_rank_evaluates_a_data_set_smaller_than_the_world
        """,
    ),
    _row(
        "MMEngine, MMCV, iMIX",
        "TensorboardLoggerHook, WandbLoggerHook, MlflowLoggerHook",
        "`tensorboard`, `wandb`, `mlflow`",
        "engine.max_epochs=1 hooks=[tensorboard,wandb,mlflow]",
        "engine.max_epochs=1 hooks=[visualization,tensorboard] hooks.tensorboard.histograms=10 "
        "hooks.tensorboard.interval=20",
        tests="""
        e2e/trackers/test_trackers.py::test_every_tracker_has_the_whole_run
        test_a_resumed_run_is_the_same_run_everywhere
        test_a_sweep_of_which_some_jobs_are_tracked
        e2e/trackers/test_tracker_pages.py::test_mlflow_shows_the_best_job_of_a_sweep_on_the_first_screen
        test_tensorboard_shows_the_scalars_and_the_table_of_hyperparameters
        hooks/test_mlflow.py::test_the_run_is_there
        hooks/test_wandb.py::test_a_run_is_in_its_file
        hooks/test_tensorboard.py::test_a_run_is_in_its_event_files
        """,
    ),
)

TABLES: dict[str, tuple[Row, ...]] = {
    "Mechanism": MECHANISM,
    "Default hooks": DEFAULT_HOOKS,
    "Custom hooks": CUSTOM_HOOKS,
}


def markdown() -> str:
    """All rows as tables."""
    lines = []
    for title, rows in TABLES.items():
        lines += [f"## {title}", "", "| from | system | here | command | tests |", "|---|---|---|---|---|"]
        for row in rows:
            commands = "<br>".join(f"`train.py {command.line}`" for command in row.commands) or "-"
            tests = "<br>".join(f"`{test}`" for test in row.tests) or "-"
            lines.append(f"| {row.source} | {row.system} | {row.option} | {commands} | {tests} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
