"""Calls into instances: recorded, as text, as JSON, and replayed."""
