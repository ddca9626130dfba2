"""Why requests took their time or failed: stages, critical paths, the slowest requests, occupancy."""
