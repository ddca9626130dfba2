"""Scenarios: their fields, their files, and the objects that they describe. This package imports neither SimPy nor
torch.
"""
