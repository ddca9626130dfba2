"""Profiles fitted to measured rows, and profiles of other GPUs derived from them."""
