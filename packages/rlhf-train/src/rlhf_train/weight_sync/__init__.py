"""The sending half of weight sync: moves the trainer's weights to running engines, bucket by bucket.

Each medium is a module with its name, which defines `opener`; see `rlhf_rollout.weight_sync`.
"""
