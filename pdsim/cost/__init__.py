"""Cost models: durations of steps and copies, the only part of a simulation that is modelled rather than executed."""
