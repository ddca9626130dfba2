"""Checkpoints as Hugging Face's files describe them: from config.json and what lies beside it to a catalog entry."""
