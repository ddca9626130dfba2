"""Runs the scheduler of pdsim on real processes, models and transfers."""
