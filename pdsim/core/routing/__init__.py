"""The router, and its knowledge of the instances of each role: loads, prompts, and answers to policies' questions."""
