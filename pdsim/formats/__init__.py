"""Files of other tools: deployments, results and pages of metrics are read; runs are written as results."""
