"""Models, GPUs, transfer engines, and layouts of models on GPUs. Catalog entries name the sources of their numbers."""
