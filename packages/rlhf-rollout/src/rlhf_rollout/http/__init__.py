"""What speaks HTTP: a client, a server, and what both sides of many calls need: batches, and pauses after failures."""
