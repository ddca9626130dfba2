"""Copies of KV: gather from pages into staging, scatter from staging into pages, push from pages into another pool's
pages.
"""
