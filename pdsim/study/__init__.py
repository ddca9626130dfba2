"""Studies of many variants of one scenario: sweeps, plans, questions, and the engines that compute their runs."""
