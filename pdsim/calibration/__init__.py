"""Compares simulations with measurements: fit makes profiles, observe measures servers, validate computes errors."""
