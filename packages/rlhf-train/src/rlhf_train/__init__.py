"""Experience, advantages, losses, the DeepSpeed engine, weight sync and the trainers."""
