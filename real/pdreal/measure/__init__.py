"""Measured times of this machine, in the rows that `pdsim calibrate` reads."""
