"""An example of a user's own project: a hook, a model, a data set. Nothing in hydraloop knows of it."""
