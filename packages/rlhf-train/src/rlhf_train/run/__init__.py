"""What online and offline runs share: metrics, trackers, the files of a run, and the account of rollouts."""
