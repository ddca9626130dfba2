"""Fits a profile to rows of measurements."""
