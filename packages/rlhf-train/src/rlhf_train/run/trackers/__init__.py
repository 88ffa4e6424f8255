"""Where metrics go: one tracker per file, all behind the protocol in `spec.py`."""
