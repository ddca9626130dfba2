"""The hosts of a run and the processes on them: how the launcher reaches hosts, and starts, watches and ends
processes.
"""
