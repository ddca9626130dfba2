"""A local web page on which a user chooses a cluster, and sees its latencies and its price."""
