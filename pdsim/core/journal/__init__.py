"""Records calls into instances and other state machines, writes them as JSON text, reads them, and replays them."""
