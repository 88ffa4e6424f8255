"""Rows of data: where they are read from, the forms of known data sets, and what cannot be used."""
