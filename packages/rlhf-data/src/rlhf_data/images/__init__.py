"""Images of rows: where they are, how they are read, and the tokens and arrays that a model reads in their place."""
