"""The sender's half of weight sync: the trainer's weights to live engines, bucket by bucket.

Each medium is a module of its name with the function `open_buffer`: see `rlhf_rollout.weight_sync`.
"""
