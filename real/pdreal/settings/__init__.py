"""Settings of a run: options, hosts, ranks and the model; and the check which scenarios real mode can run."""
