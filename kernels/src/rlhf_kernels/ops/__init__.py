"""One folder an operator: `reference.py` in plain torch, `triton.py` fused, `README.md` with the mathematics."""
