"""Commands of the catalog: the names that scenarios can use, and the models that the user adds."""

import re
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pdsim.cli.command import Json, print_json

catalog = App(
    name="catalog", help="List the models and GPUs that scenarios can name. Subcommands show or add an entry."
)


@catalog.default
@catalog.command(name="list")
def list_(*, json_: Json = False) -> None:
    """List the models and GPUs that scenarios can name."""
    from pdsim.show.terminal.tables import print_catalog
    from pdsim.system.catalog import names

    if json_:
        print_json({"models": names("models"), "gpus": names("gpus")})
    else:
        print_catalog()


@catalog.command
def show(name: Annotated[str, Parameter(help="A model, GPU or transport.")], /) -> None:
    """Print the catalog files of all entries with this name."""
    from pdsim.system.catalog import KINDS, CatalogError, file_of, hint, names

    paths = [file_of(kind, name) for kind in KINDS if name in names(kind)]
    if not paths:
        known = [name for kind in KINDS for name in names(kind)]
        raise CatalogError(f"no entry {name!r}; there are {', '.join(known)}{hint(name, known)}")
    for path in paths:
        print(f"# {path}\n{path.read_text(encoding='utf-8')}", end="")


@catalog.command
def add(
    config: Annotated[Path, Parameter(help="A model's config.json as Hugging Face has it.")],
    /,
    *,
    name: Annotated[
        str | None, Parameter(help="Name of the model in scenarios [the name of the config's folder].")
    ] = None,
) -> None:
    """Add a model to the user's catalog: ~/.config/pdsim, or --catalog."""
    from pdsim.inputs import read_json
    from pdsim.scenario.yaml_file import write_yaml
    from pdsim.system.catalog import CatalogError, EntryError, build, file_of, folders, names
    from pdsim.system.checkpoint.entry import entry_of, stored_bytes
    from pdsim.system.checkpoint.quantization import FILE_BESIDE
    from pdsim.system.model import ModelSpec

    config = config / "config.json" if config.is_dir() else config
    name = name or config.absolute().parent.name.lower()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise CatalogError(f"--name: expected letters, digits, '.', '_' and '-', found {name!r}")
    if name in names("models"):
        raise CatalogError(f"{file_of('models', name)} is a model {name!r} already: choose another --name")
    try:
        beside, index = config.with_name(FILE_BESIDE), config.with_name("model.safetensors.index.json")
        quantized = (read_json(beside) or {FILE_BESIDE: None}) if beside.is_file() else None
        stored = read_json(index) if index.is_file() else None
        entry = entry_of(read_json(config), str(config), quantized, stored_bytes(stored))
        model = build(ModelSpec, entry, name=name)
    except EntryError as wrong:
        raise CatalogError(f"{config}: {wrong}") from None
    path = folders()[1] / "models" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_yaml(entry, path)
    print(f"{path}: {model.num_params / 1e9:,.1f} B parameters, {model.num_active_params / 1e9:,.1f} B active")
    for note in filter(None, entry["sources"].get("notes", "").split("; ")):
        print(f"note: {note}")
