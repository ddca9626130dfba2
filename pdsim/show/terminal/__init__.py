"""Prints runs, measurements, answers, sweeps and plans on the terminal."""
