"""Checkpoints in Hugging Face's format: from config.json and files beside it to a catalog entry."""
