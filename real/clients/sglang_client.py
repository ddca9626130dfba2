"""SGLang's bench client as it is installed, without its engine: python sglang_client.py ARGUMENTS

`import sglang` imports the whole engine, and with it CUDA. Its packages are entered here without that; of the two
things that the client takes from the engine, one is imported as it is and the other, a name, is given.
"""

import sys
from pathlib import Path
from types import ModuleType


def enter(name: str) -> ModuleType:
    """The package, with its modules and without its __init__."""
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(HOME.joinpath(*name.split(".")))]
    return package


HOME = next(Path(path) for path in sys.path if Path(path, "sglang", "benchmark").is_dir())
for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
    enter(name)
engine = sys.modules["sglang.srt.disaggregation.utils"] = ModuleType("sglang.srt.disaggregation.utils")
engine.FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # only --fake-prefill reads it

from sglang.benchmark.serving import cli_main  # noqa: E402

cli_main()
