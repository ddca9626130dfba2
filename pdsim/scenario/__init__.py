"""Scenarios: the fields of a scenario file, how files are read, and the objects that a scenario describes. This package
imports neither SimPy nor torch.
"""
