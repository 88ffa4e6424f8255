"""Users' code in processes of their own: reward functions, and agents with their environments and tools.

`pool` has the processes, `rpc` is this side of one, `serving` the other side; `guarded` and `guard` start and end it.
"""
