"""Real mode: runs the scheduler of pdsim.core on torch models, real KV caches and real transfers."""
