"""A decode instance: its queue for pages, its batch, and its life of a request."""
