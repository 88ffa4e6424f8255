"""Sums kept in a wider dtype than what is added to them."""
