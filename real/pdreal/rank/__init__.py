"""One rank of an instance: its process, its loop of steps, and the model's forwards."""
