"""HTML pages of runs, sweeps and plans. Each page is one file."""
