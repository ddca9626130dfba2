"""Reads and writes the results of other tools."""
