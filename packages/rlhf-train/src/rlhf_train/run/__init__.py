"""What online and offline runs share: what a run shows, measures, keeps count of, and leaves behind."""
