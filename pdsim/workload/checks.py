"""What the settings of a workload must be. A broken one is a ValueError that names it."""


def positive(what: object, **values: float | None) -> None:
    """Counts and sizes: at least 1. None stands for "all"."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{type(what).__name__} needs {name} >= 1, found {value:g}")


def above_zero(what: object, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{type(what).__name__} needs {name} > 0, found {value:g}")
