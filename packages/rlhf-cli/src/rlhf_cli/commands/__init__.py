"""The commands. Each parses its flags first and imports heavy libraries afterwards."""
