"""Shows runs, sweeps and plans on the terminal and as HTML pages; also prints measurements, answers to questions, and
the reference of `pdsim fields`.
"""
