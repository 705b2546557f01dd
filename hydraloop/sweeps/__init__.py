"""Sweeps: the directory is the truth, and any process may be killed.

Reading order: overrides_to_axes, check_sweep, job_source, sweep_directory, job_states, controller, job, executors.
Only the processes of jobs import torch.
"""
