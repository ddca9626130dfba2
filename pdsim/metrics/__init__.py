"""Records of a run, its summary and its figures. They are the same for simulated and for real runs."""
