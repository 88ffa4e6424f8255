"""What is learned from fixed examples: one objective per file."""
