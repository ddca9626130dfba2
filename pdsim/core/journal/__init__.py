"""Records calls into instances, writes them as JSON text, reads them, and replays them."""
