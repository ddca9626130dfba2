"""Makes catalog entries from checkpoints in Hugging Face's format: config.json and the files beside it."""
