"""A model's folder: its files, its weights without memory for them, its scalar head, what is not trained."""
