"""Studies simulate many variants of one scenario: sweeps, plans and questions. This package also has the engines that
run the simulations.
"""
