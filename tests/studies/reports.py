"""What `pdsim validate CASE` finds, simulated once for all tests that ask."""

from functools import cache

from docs.tables import validate

report = cache(validate)
