"""The training engine: gradients, optimizer, sharding."""
