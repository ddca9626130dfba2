"""Records, summaries and figures of a run. The same for simulated and for real runs."""
