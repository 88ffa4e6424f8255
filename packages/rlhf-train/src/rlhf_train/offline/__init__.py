"""Offline training: one loop over a fixed data set, with an objective for the loss."""
