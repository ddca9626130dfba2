"""What happened: records, summaries, figures. The same for simulated and for real runs."""
