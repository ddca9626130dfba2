"""Answers to what users ask: a question is what varies, how the winner is chosen, and what to say."""
