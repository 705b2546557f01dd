"""The states of a sweep's jobs for readers, also when no controller is there to write them."""

from __future__ import annotations

from hydraloop.sweeps import states
from hydraloop.sweeps.slurm import submissions
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory


def current_states(directory: SweepDirectory) -> list[JobState]:
    """Return the states of all jobs. Without a controller, one whose process has ended is not `running`.

    A job that may wait in Slurm's queue is: no answer of Slurm does not mean that it is not there.
    """
    found = directory.states()
    if not any(state.state == "running" for state in found) or directory.holder() is not None:
        return found
    queue = submissions.jobs(directory.path)
    queued = None if queue is None else {what.partition(".")[0] for what in queue}
    return [
        state
        if state.state != "running" or queued is None or str(state.number) in queued
        else states.current(state, directory.run_dir(state))
        for state in found
    ]
