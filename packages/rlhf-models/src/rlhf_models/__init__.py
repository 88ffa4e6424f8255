"""Actor, critic, reward and reference models over Hugging Face models."""

from typing import TYPE_CHECKING

from rlhf_data import lazy_exports

if TYPE_CHECKING:
    from rlhf_models.actor import Actor as Actor
    from rlhf_models.actor import ActorOutput as ActorOutput
    from rlhf_models.actor import PolicyOutput as PolicyOutput
    from rlhf_models.batch import TokenBatch as TokenBatch
    from rlhf_models.critic import Critic as Critic
    from rlhf_models.loading import check_reward_model as check_reward_model
    from rlhf_models.loading import check_same_tokenizer as check_same_tokenizer
    from rlhf_models.loading import check_tokenizer_fits as check_tokenizer_fits
    from rlhf_models.loading import load_actor as load_actor
    from rlhf_models.loading import load_config as load_config
    from rlhf_models.loading import load_critic as load_critic
    from rlhf_models.loading import load_reference as load_reference
    from rlhf_models.loading import load_reward_model as load_reward_model
    from rlhf_models.loading import load_tokenizer as load_tokenizer
    from rlhf_models.reward import RewardModel as RewardModel
    from rlhf_models.reward import score_sequences as score_sequences
    from rlhf_models.weights import hf_named_weights as hf_named_weights
    from rlhf_models.weights import save_hf as save_hf

__all__, __getattr__ = lazy_exports(__name__, __file__)
