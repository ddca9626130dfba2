"""Results of load generators and simulators as summaries of ours, and runs as their results."""
