"""Checks before a run starts anything: files, keys, tokenizers, lengths, rewards, devices."""
