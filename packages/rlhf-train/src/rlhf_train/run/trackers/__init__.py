"""Trackers receive a run's metrics. Each file has one, with the interface of `spec.Tracker`."""
