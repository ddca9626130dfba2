"""Cost models: the durations of steps and copies. Only durations are modelled. Scheduling and memory management are
not: the simulator runs the same code for them as real mode.
"""
