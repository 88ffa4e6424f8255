"""One folder per operator: `reference.py` in plain torch, `triton.py` fused, `README.md` with the mathematics."""
