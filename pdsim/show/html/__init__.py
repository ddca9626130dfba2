"""Runs, sweeps and plans as pages of one file each."""
