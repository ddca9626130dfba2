"""Files of other tools: reads deployments, results and metrics pages; writes runs as results of other tools."""
