"""A local page: choose a cluster, and see what it does."""
