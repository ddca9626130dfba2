"""Judges whether a run meets an SLO, by the numbers that the SLO limits, and says how confident the judgement is."""
