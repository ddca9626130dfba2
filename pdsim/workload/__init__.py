"""Workloads: requests from generators and from public traces, with output lengths that policies do not see."""
