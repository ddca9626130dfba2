"""Settings of a run: options, hosts, ranks, the model as it is computed, and which scenarios can be run for real."""
