"""Explains why requests took their time or failed: stages, critical paths, the slowest requests, and the use of
instances.
"""
