"""Cost models: the durations of steps and copies. No other part of a simulation is modelled; the rest is executed."""
