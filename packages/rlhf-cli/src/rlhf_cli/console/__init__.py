"""What a command shows on the terminal, and how it ends."""
