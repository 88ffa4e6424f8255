"""Actor, critic and reference models over Hugging Face models."""
