"""Workloads: requests from generators or from public traces. Policies do not see the requests' output lengths."""
