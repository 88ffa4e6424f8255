"""Losses of one token each, and the reduction that makes one number of them."""
