"""Files of other tools. Reads deployments, results and pages of metrics, and writes runs as results of other tools."""
