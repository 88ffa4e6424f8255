"""Programs that stay: a reward server, and a conversation in the terminal."""
