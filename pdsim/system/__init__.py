"""Models, GPUs, transfer engines, and the layout of a model on GPUs. Entries name the source of every number."""
