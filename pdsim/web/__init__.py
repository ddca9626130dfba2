"""A local page on which a user chooses a cluster and sees its latency and price."""
