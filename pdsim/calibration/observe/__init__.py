"""A running server measured from outside: probes, then a load."""
