"""Communication and logs of the processes of a run: channel, messages, clock and logbooks."""
