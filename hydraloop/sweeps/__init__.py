"""Sweeps: the directory is the truth, and any process may die.

Reading order: axes, planning, job_checks, source, sweep_directory, states, queue, job, executors, controller. Nothing
here imports torch, except in the processes of jobs.
"""
