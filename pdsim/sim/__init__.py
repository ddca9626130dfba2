"""The SimPy driver: simulated time, modelled durations, and no decisions."""
