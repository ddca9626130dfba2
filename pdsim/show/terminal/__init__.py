"""Runs, measurements, answers and plans as text."""
