"""The cheapest cluster that meets an SLO."""
