"""Makes catalog entries from checkpoints in Hugging Face's format: from config.json and the files next to it."""
