"""On a GPU, kernel tests run compiled kernels; elsewhere they run in Triton's interpreter. Without torch they are
skipped.
"""

import importlib.util
import os

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
else:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
