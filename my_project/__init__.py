"""An example of a project: a custom hook, model and data set. hydraloop does not import it."""
