"""Tests of real mode. They are skipped without torch, and `-m "not real"` leaves them out."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Lets torch use one thread: matrices are tiny, and the threads of tests that run at the same time would wait for
    each other.
    """
    if find_spec("torch"):
        torch.set_num_threads(1)
