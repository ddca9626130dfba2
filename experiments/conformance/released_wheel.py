"""A released wheel of an engine, unpacked beside what its scheduler imports."""

import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path

IMPORTED = {
    "sglang": [
        *("annotated-doc", "compressed-tensors", "dill", "einops", "fastapi", "gguf", "loguru", "msgspec"),
        *("opentelemetry-api", "orjson", "partial-json-parser", "pillow", "psutil", "pybase64", "pycountry"),
        *("requests", "sentencepiece", "setproctitle", "starlette"),
    ],
    "vllm": [
        *("cachetools", "cbor2", "cloudpickle", "einops", "msgspec", "openai-harmony", "partial-json-parser"),
        *("prometheus-client", "psutil", "py-cpuinfo", "pybase64", "requests", "uvloop"),
    ],
}
"""Packages that each engine's scheduler imports beside torch and transformers."""
WHOLE = "transformers"
"""The package that is installed with what it needs itself."""
PARSING = "msgspec"
"""What the engines' parsers of flags need."""


@dataclass(frozen=True)
class Wheel:
    engine: str
    release: str
    folder: Path
    """It has the unpacked wheel in a folder of its own."""

    @property
    def path(self) -> Path:
        return self.folder / "wheel"

    def install_site(self) -> str:
        """Install what the scheduler imports, in the versions that the wheel asks for; folders, separated by colons."""
        packages = self.folder / "packages"
        _pip("install", "--target", packages, self.wanted(WHOLE))
        _pip("install", "--no-deps", "--target", packages, *map(self.wanted, IMPORTED[self.engine]))
        return f"{self.path}:{packages}"

    def install_parsing(self) -> Path:
        packages = self.folder / "parsing"
        _pip("install", "--no-deps", "--target", packages, self.wanted(PARSING))
        return packages

    def wanted(self, package: str) -> str:
        """The package as the wheel requires it, without extras and markers."""
        (info,) = self.path.glob(f"{self.engine}-*.dist-info")
        pattern = re.compile(rf"{package.replace('-', '[-_]')}(?:\[[^]]*\])?\s*\(?((?:[=<>!~][^;)]*)?)\)?\s*(;.*)?$")
        found = filter(None, map(pattern.match, PathDistribution(info).requires or []))
        return next((package + match[1].strip() for match in found if "extra" not in (match[2] or "")), package)


def fetch(wanted: str, folder: Path) -> Wheel:
    """Unpack a wheel, all but its compiled files.

    wanted: a file, or what pip calls a requirement, of which the index's newest is taken.
    """
    file = Path(wanted)
    if file.suffix != ".whl":
        _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, wanted)
        (file,) = folder.glob("*.whl")
    engine, release, *_ = file.name.split("-")
    if engine not in IMPORTED:
        raise SystemExit(f"{wanted} is a wheel of {engine}: {' and '.join(IMPORTED)} have rules to compare")
    with zipfile.ZipFile(file) as archive:
        members = [name for name in archive.namelist() if not re.search(r"\.so(\.[\d.]+)?$", name)]
        archive.extractall(folder / "wheel", members)
    return Wheel(engine, release, folder)


def _pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip {words[0]} failed:\n{done.stderr[-2000:]}")
