"""Whether a run meets an SLO, from which readings, and how sure that is."""
