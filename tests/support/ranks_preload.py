"""Imports what ranks import, for `trainer_testing.run_ranks`. It starts no thread and touches no GPU."""

import gc

gc.disable()  # it would look at all imported modules again and again, here and in each fork

import transformers.models.qwen2.modeling_qwen2  # noqa: E402

import rlhf_train.learning.worker  # noqa: E402
from rlhf_rollout.host import local_gpus  # noqa: E402
from rlhf_train.engine.deepspeed_internals import import_deepspeed  # noqa: E402

__all__ = ["rlhf_train", "transformers"]

# With a GPU the ranks choose between it and the CPU when they import DeepSpeed.
if local_gpus() == 0:
    import_deepspeed("cpu")

gc.freeze()
gc.enable()
