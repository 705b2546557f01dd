"""Jobs, sweeps and single runs on Slurm."""
