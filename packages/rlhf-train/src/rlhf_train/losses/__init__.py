"""Losses per token or per answer, and the reductions that turn them into one number."""
