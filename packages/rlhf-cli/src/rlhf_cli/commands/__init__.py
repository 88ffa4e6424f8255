"""The commands: each parses its flags first and imports what it runs afterwards."""
