"""Rows as training examples of every kind, encoded by several processes, with a cache."""
