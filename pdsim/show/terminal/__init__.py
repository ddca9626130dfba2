"""Prints runs, measurements, answers and plans on the terminal."""
