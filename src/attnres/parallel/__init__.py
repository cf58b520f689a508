"""More than one device: pipeline with cross-stage cache, sequence sharding, data parallelism, and what they cost."""
