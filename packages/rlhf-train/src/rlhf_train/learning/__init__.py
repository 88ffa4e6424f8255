"""From scored rollouts to new weights: the learner and what runs in the processes that train."""
