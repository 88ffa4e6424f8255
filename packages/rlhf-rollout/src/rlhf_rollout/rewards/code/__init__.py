"""Rewards for programs: their tests, run in a sandbox."""
