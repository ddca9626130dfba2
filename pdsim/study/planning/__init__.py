"""Plans: finds the cheapest cluster that meets an SLO, and reports this cluster and alternatives to it."""
