"""Builds the objects that a scenario describes: sizes of instances, state machines, cost models and links."""
