"""The commands of `rlhf-rollout`: generate, score, serve a reward, and chat."""
