"""Offline training: one loop over a fixed data set; what is learned from it is an objective."""
