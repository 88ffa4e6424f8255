"""Imports what ranks import, for `trainer_testing.run_ranks`. It starts no thread and touches no GPU."""

import transformers.models.qwen2.modeling_qwen2

import rlhf_train.learning.worker
from rlhf_rollout.host import local_gpus
from rlhf_train.engine.deepspeed_internals import import_deepspeed

__all__ = ["rlhf_train", "transformers"]

# With a GPU the ranks choose between it and the CPU when they import DeepSpeed.
if local_gpus() == 0:
    import_deepspeed("cpu")
