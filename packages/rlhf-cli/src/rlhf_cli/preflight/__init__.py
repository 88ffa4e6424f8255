"""What is looked at before anything starts: files, keys, tokenizers, lengths, rewards, devices."""
