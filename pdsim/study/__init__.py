"""Many points of one scenario: designs, engines that compute points, a folder that keeps them, and what is best."""
