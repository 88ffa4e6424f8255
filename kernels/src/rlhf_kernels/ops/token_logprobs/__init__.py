"""Log-probability of one token a row, and entropy of the row, from logits."""
