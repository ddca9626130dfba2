"""What the processes of a run tell each other and write down: channel, messages, clock and logbooks."""
