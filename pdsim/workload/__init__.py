"""Workloads: requests from generators or from traces, and the clients that send the requests. Policies do not see the
requests' output lengths.
"""
