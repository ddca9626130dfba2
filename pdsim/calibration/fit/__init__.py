"""Profiles that are fitted to measured times, and profiles for other GPUs that are derived from them."""
