"""The training engine: gradients, optimizer and sharding of one model."""
