"""From rewards to what is learned: the table of algorithms, group baselines, advantages, KL, corrections."""
