"""OpenRLHF's command modules and flags, as commands and options here."""
