"""A study as a value: its schema, its file, and the objects it describes. Knows neither SimPy nor torch."""
