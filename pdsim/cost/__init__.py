"""How long things take: the only part of a simulation that is modelled rather than executed."""
