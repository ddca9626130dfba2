"""Reads results of load generators and simulators as summaries, and writes runs as their results."""
