"""Rewards: functions in worker processes, servers, reward models, and their mix."""
