"""What is looked at before anything starts: files, keys, tokenizers, lengths, rewards, devices."""

from rlhf_cli.preflight.data import check_keys
from rlhf_cli.preflight.devices import check_device, find_resources
from rlhf_cli.preflight.inputs import Inputs, check_inputs
from rlhf_cli.preflight.models import check_attention, check_companion, check_context, load_model_files

__all__ = [
    "Inputs",
    "check_attention",
    "check_companion",
    "check_context",
    "check_device",
    "check_inputs",
    "check_keys",
    "find_resources",
    "load_model_files",
]
