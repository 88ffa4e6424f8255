"""What `rlhf doctor` looks at on a machine, one function per finding."""
