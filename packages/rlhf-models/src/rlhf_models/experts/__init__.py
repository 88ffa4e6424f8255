"""Mixtures of experts: which experts tokens are routed to, and the same routes again."""
