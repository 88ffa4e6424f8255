"""The configuration of each command: typed sections of options. Does not need torch."""
