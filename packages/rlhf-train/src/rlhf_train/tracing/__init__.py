"""A run's timeline as a file for Perfetto."""
