"""Points (variants) of one scenario: tasks, the engines that compute them, the folder of their results."""
