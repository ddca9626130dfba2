"""Uncertainty of a result: its range, its noise, its sensitivity to resources, and steps of sizes that were not
measured.
"""
