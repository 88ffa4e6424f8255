"""The sender's half of weight sync: the trainer's weights to live engines, bucket by bucket."""
