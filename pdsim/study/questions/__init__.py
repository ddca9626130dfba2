"""Answers to users' questions. A question defines what varies, how the best candidate is chosen, and the text."""
