"""Relates simulations to measurements: `fit` makes profiles of measured times, `observe` measures servers, `validate`
computes errors of simulations.
"""
