"""What a cluster is made of: models, GPUs and how a model lies on them, with the source of every number."""
