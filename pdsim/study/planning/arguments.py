"""Arguments of a plan, as a command line has them."""

from collections.abc import Iterable
from math import inf
from typing import Any

from pdsim.scenario.yaml_file import ConfigError, parse_yaml
from pdsim.system.catalog import CatalogError, load_gpu


def prices_of(gpus: Iterable[str]) -> dict[str, float]:
    """Prices of "h100=2.5" or "h100", whose price is 1 unless others have theirs. Raises ConfigError."""
    found: dict[str, float] = {}
    unpriced = []
    for gpu in gpus:
        name, equals, price = gpu.partition("=")
        try:
            load_gpu(name)
            found[name] = float(price) if equals else 1.0
        except CatalogError as wrong:
            raise ConfigError(f"--gpu {gpu}: {wrong}") from None
        except ValueError:
            raise ConfigError(f"--gpu {gpu}: expected NAME=PRICE, such as h100=2.5") from None
        if not 0 < found[name] < inf:
            raise ConfigError(f"--gpu {gpu}: a price is above 0")
        if not equals:
            unpriced.append(name)
    if unpriced and len(found) > 1:
        raise ConfigError(f"--gpu {unpriced[0]}: several GPUs need a price each, such as {unpriced[0]}=2.5")
    return found


def fields_of(tried: Iterable[str]) -> dict[str, list[Any]]:
    """Fields and values of "page_size=[1, 64]". Raises ConfigError."""
    found: dict[str, list[Any]] = {}
    for one in tried:
        path, equals, text = one.partition("=")
        values = parse_yaml(text, f"--try {one}") if equals else None
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--try {one}: expected FIELD=[VALUE, ...], such as decode.radix_cache=[true, false]")
        found[path.strip()] = values
        if path.strip().endswith((".tp", ".instances")) and not all(
            type(value) is int and value > 0 for value in values
        ):
            raise ConfigError(f"--try {one}: whole numbers above 0")
        if path.strip().endswith(".gpu"):
            raise ConfigError(f"--try {one}: GPUs have prices, and each role tries all of them: --gpu h100=2.5")
    return found
