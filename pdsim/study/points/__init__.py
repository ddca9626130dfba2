"""Points of one scenario: tasks, engines that compute them, the folder that keeps them, their results."""
