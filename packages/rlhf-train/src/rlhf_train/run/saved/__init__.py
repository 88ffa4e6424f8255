"""The files of the driver's state in a checkpoint: JSON, rollout groups and arrays."""
