"""Models, GPUs and how a model lies on them, with the source of every number."""
