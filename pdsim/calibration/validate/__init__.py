"""Compares measured runs with simulated ones."""
