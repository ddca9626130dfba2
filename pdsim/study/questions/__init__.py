"""Answers to users' questions. Each question defines which settings vary, how the best candidate is chosen, and the
text of the answer.
"""
