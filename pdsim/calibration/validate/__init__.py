"""Computes errors of simulations against measurements: published numbers, runs in real mode, and observed loads."""
