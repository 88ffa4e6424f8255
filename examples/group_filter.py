"""A filter of your own: train on prompts with right and wrong responses among those that ended by themselves.

A group in which only the length limit makes the difference would teach the policy to be short, not to be right.

rlhf check examples/group_filter.py
rlhf ppo --group_filter_path examples/group_filter.py
"""


def keep_group(group):
    """Return whether to train on the responses to a prompt."""
    ended = group.is_right[~group.truncated]
    return 0 < ended.sum() < len(ended)
