"""Models, GPUs, and the layout of a model on GPUs, with the source of every number."""
