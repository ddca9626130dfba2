"""Sections of a scenario file: their fields, units, defaults and checks."""
