"""Faster passes on a GPU: layers compiled in place, and CUDA graphs of passes over full packs."""
