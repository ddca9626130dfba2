"""Which model a run has: the catalog's with random weights, or a checkpoint's own."""

from pathlib import Path

from pdreal.model.config import ModelConfig, check_same_shape, from_catalog, from_checkpoint
from pdreal.options import Options


def model_config(options: Options, name: str) -> ModelConfig:
    """Needs no torch. Raises ModelError."""
    catalog = from_catalog(name)
    if options.weights.startswith("seed:"):
        return catalog
    checkpoint = from_checkpoint(Path(options.weights))
    check_same_shape(checkpoint, catalog)
    return checkpoint
