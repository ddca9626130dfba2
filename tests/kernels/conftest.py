"""Kernel tests run compiled on a GPU, and in Triton's interpreter anywhere else; without torch they are left out."""

import importlib.util
import os

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
else:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
