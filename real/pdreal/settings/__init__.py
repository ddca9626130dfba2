"""Settings of a run (options, hosts, ranks, model), and a check that real mode can run a scenario."""
