"""Builds what a scenario describes: sizes, state machines, cost models, links."""
