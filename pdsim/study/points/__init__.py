"""Points (variants) of one scenario, the tasks that simulate them, the engines that compute the tasks, and the folder
of results.
"""
