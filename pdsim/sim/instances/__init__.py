"""Instances in simulated time: their loops, and the steps that they run."""
