"""The router, and the data that it keeps about the instances of each role: loads, prompts and sessions."""
