"""Records, summaries and figures of a run, the same for simulated and real runs."""
