"""Studies that simulate many variants of one scenario: sweeps, plans and questions. Also the engines that run the
simulations.
"""
