"""Shows runs, sweeps and plans on the terminal and as HTML pages."""
