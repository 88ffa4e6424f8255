"""Actor, critic, reward and reference models over Hugging Face models."""

from rlhf_data import lazy_exports

__all__, __getattr__ = lazy_exports(
    __name__,
    {
        "actor": "Actor ActorOutput PolicyOutput",
        "batch": "TokenBatch",
        "critic": "Critic",
        "loading": (
            "check_reward_model check_same_tokenizer check_tokenizer_fits load_actor load_config load_critic"
            " load_reference load_reward_model load_tokenizer"
        ),
        "reward": "RewardModel score_sequences",
        "weights": "hf_named_weights save_hf",
    },
)
