"""What all notebooks share: where measurements are, and whether to be quick."""

import os
from pathlib import Path

EXPERIMENTS = Path("../experiments")
REAL = EXPERIMENTS / "validation-h200"
"""Runs and measured rows of two H200s."""
FAST = os.environ.get("PDSIM_FAST") == "1"
"""Small loads, as a test runs them: conclusions are the same, numbers are not."""
