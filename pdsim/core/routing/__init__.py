"""The router, and the instances of each role as it knows them: loads, prompts, what a policy may ask."""
