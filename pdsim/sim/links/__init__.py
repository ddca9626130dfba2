"""Traffic on links in simulated time: KV transfers, copies of cached pages, and forwards of servers over several
hosts.
"""
