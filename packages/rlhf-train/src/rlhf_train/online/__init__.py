"""Online training: the loop, the parts that it calls, and the placement of their processes."""
