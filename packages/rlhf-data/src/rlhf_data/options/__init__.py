"""Options of commands: declared, read from the command line and files, explained."""
