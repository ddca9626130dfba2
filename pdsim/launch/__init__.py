"""Commands and manifests that start the cluster of a scenario with an engine."""
