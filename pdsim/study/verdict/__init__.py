"""Judges whether a run meets an SLO, by its readings, with a confidence."""
