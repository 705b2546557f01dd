"""`hydraloop report`: pages of HTML about runs and sweeps. Imports no torch; plotly and Optuna only where they draw."""
