"""The hosts of a run and the processes on them: how each is reached, started, watched and ended."""
