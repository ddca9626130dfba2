"""Scales a profile to a GPU or a model that was not measured."""
