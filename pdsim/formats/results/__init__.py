"""Reads results of load generators and simulators as summaries of runs, and writes runs as such results."""
