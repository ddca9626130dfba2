"""Errors of simulations against measurements: published numbers, real runs, observed loads."""
