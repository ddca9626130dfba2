"""Plans: finds the cheapest cluster that meets an SLO, and reports it beside its alternatives."""
