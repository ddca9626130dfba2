"""The hosts of a run and the processes on them: how they are reached, started, watched and ended."""
