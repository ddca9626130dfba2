"""Reports of `pdsim validate CASE`. Each case is simulated once for all tests."""

from functools import cache

from docs.tables import validate

report = cache(validate)
