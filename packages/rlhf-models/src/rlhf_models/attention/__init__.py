"""Attention over packed sequences, also with shared prompts, and over sequences that ranks divide."""
