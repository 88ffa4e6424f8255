"""What a run did, as a page: metrics, configuration, rollouts and warnings."""
