"""Flags that people know from OpenRLHF and that have another name here, or none."""

from collections.abc import Collection

_INSTEAD = {
    "enable_vllm_is_correction": "--is_correction_level token",
    "entropy_coef": "--entropy_loss_coef",
    "flash_attn": "--attn_implementation, whose default `auto` picks the quickest there is",
    "learning_rate": "--actor_learning_rate and --critic_learning_rate",
    "max_len": "--prompt_max_len and --generate_max_len",
    "max_new_tokens": "--generate_max_len",
    "ref_pretrain": "--pretrain, which is the reference, too",
    "vllm_is_correction_type": "--is_correction_level token (tis), with --is_correction_mode mask (icepop), or"
    " --is_correction_level geometric --is_correction_mode mask (seq-mask-tis)",
    "vllm_is_truncated_threshold": "--is_correction_threshold LOW HIGH",
}
# Whole names, and words that a name has only there.
_NOT_HERE = frozenset(
    "4bit accum actor_init_on_gpu agent async aux backend checkpoint ckpt comm dataloader deepcompile determinism"  # noqa: SIM905
    " ds_tensor_parallel_size head image images kernel lora offload partial perf pretrain_data ptx ray"
    " reentrant ring rollout_max_tokens_per_gpu save_steps split target_modules tokenizer"
    " train_max_tokens_per_gpu use_dynamic_batch use_ms visual vllm_generate_batch_size zpg".split()
)


def known_elsewhere(flag: str, flags: Collection[str]) -> str | None:
    """Return what stands for an unknown flag among a command's own `flags`; None for one that nobody knows."""
    name = flag.lstrip("-").replace("-", "_")
    instead = _INSTEAD.get(name, "")
    if instead.partition(" ")[0].rstrip(",") in flags:
        return f"instead of `{flag}` use {instead}"
    words = {name, *name.split("_")}.difference(*(known.lstrip("-").split("_") for known in flags))
    return f"there is no option like `{flag}` here" if instead or words & _NOT_HERE else None
