"""Decode and aggregated instances with pipeline stages, which run several micro-batches at once."""
