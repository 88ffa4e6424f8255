"""From prompts to scored rollouts: requests to engines, rewards, and the stream of groups to training."""
