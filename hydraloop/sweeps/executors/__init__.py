"""What runs the processes of jobs: the pool on this machine, submitit, or Ray."""
