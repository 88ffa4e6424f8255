"""Offline training: one loop over a fixed data set. An objective defines the loss."""
