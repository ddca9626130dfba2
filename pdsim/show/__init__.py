"""Runs and sweeps as one HTML page: figures are plain functions, pages choose among them."""
