"""Where metrics go: one tracker per file."""
