"""Online training: a controller that places workers and engines, and the loop it runs."""
