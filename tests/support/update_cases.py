"""Cases of whole updates, in which every row of every table of algorithms appears, and what leaves a feature out."""

import dataclasses

from exact_adam import Adam
from exact_losses import Recipe

# Adam divides by the gradient's own size; its epsilon lies above the rounding of gradients near 0.
ADAM = Adam(learning_rate=1e-2, eps=1e-4)
CLIPPED_ADAM = Adam(
    learning_rate=2e-2, eps=1e-4, weight_decay=0.1, max_norm=0.05, scheduler="cosine_with_min_lr", warmup_steps=1,
    total_steps=4,
)  # fmt: skip
LINEAR_ADAM = Adam(
    learning_rate=1e-2, betas=(0.8, 0.99), eps=1e-3, max_norm=0.2, scheduler="linear", warmup_steps=2, total_steps=6
)


@dataclasses.dataclass(frozen=True)
class Case:
    """An algorithm, an optimizer, and how the rows of a micro-batch lie."""

    recipe: Recipe
    adam: Adam = ADAM
    max_epochs: int = 2
    packing: bool = False


CASES = {
    "gae": Case(Recipe(
        estimator="gae", gamma=0.9, lambd=0.8, bootstrap_truncated=True, value_clip=0.02, kl_coef=0.1, dual_clip=1.05,
        clip_low=0.02, clip_high=0.03, entropy_coef=0.01,
    ), CLIPPED_ADAM),
    "gae, centred, CISPO": Case(Recipe(
        estimator="gae", gamma=0.97, turn_gamma=0.5, lambd=0.5, policy_loss="cispo", clip_low=0.02, clip_high=0.02,
        whiten_std=False, kl_coef=0.1, kl_estimator="k3", use_kl_loss=True, correction=("token", "truncate", 0.9, 1.1),
    ), packing=True),
    "gae, GSPO": Case(Recipe(
        estimator="gae", gamma=0.95, bootstrap_truncated=True, value_clip=0.5, policy_loss="gspo", clip_low=3e-3,
        clip_high=4e-3, kl_coef=0.05, kl_estimator="k2",
    ), LINEAR_ADAM),
    "gae, REINFORCE": Case(Recipe(estimator="gae", lambd=0.9, policy_loss="reinforce", old_logprobs="rollout")),
    # Rollouts that the actor leaves out are the critic's to learn from all the same.
    "gae, masked": Case(Recipe(
        estimator="gae", gamma=0.95, lambd=0.9, kl_coef=0.05, clip_low=0.02, clip_high=0.02,
        correction=("sequence", "mask", 0.7, 1.4, True),
    )),
    "gae, teacher": Case(Recipe(estimator="gae", gamma=0.95, lambd=0.9, teacher_coef=0.3, clip_low=0.02)),
    "reinforce, teacher": Case(Recipe(
        estimator="reinforce", gamma=0.9, teacher_coef=0.5, kl_coef=0.1, kl_estimator="k2", old_logprobs="rollout",
    ), packing=True),
    "group_norm, teacher": Case(Recipe(
        estimator="group_norm", teacher_coef=0.7, correction=("token", "mask", 0.9, 1.1),
    )),
    "group_norm, teacher's distribution": Case(Recipe(
        estimator="group_norm", teacher_coef=2.0, distribution=(5, "reverse_kl", 0.5), old_logprobs="rollout",
    )),
    "dr_grpo, teacher, JSD": Case(Recipe(
        estimator="dr_grpo", teacher_coef=20.0, distribution=(9, "jsd", 0.3), mask_stale=1,
    ), packing=True),
    "rloo, teacher, forward": Case(Recipe(
        estimator="rloo", teacher_coef=0.5, distribution=(7, "forward_kl", 0.5), old_logprobs="skip",
    ), max_epochs=1, packing=True),
    "group_norm, uncertain tokens": Case(Recipe(
        estimator="group_norm", top_quantile=0.3, old_logprobs="rollout", clip_low=0.02, clip_high=0.02, mask_stale=1,
    ), packing=True),
    "dr_grpo, uncertain tokens": Case(Recipe(
        estimator="dr_grpo", top_quantile=0.5, correction=("token", "filter", 0.9, 1.1), entropy_coef=0.01,
    )),
    "gae, MIS-PO": Case(Recipe(
        estimator="gae", policy_loss="reinforce", correction=("geometric", "filter", 0.98, 1.02),
    ), packing=True),
    "rloo, filtered": Case(Recipe(
        estimator="rloo", clip_low=0.1, clip_high=0.2, correction=("sequence", "filter", 0.7, 1.4, True),
    )),
    "reinforce": Case(Recipe(
        estimator="reinforce", gamma=0.95, kl_coef=0.1, kl_estimator="k2", old_logprobs="rollout",
        reduction="seq_mean_token_sum", entropy_coef=0.02, clip_low=0.1, clip_high=0.1,
    ), CLIPPED_ADAM),
    "reinforce, CISPO": Case(Recipe(
        estimator="reinforce", policy_loss="cispo", gamma=0.9, clip_low=0.03, clip_high=0.01, kl_coef=0.1,
        kl_estimator="k3", correction=("sequence", "mask", 0.7, 1.4),
    )),
    "reinforce_baseline": Case(Recipe(
        estimator="reinforce_baseline", gamma=0.98, kl_coef=0.05, clip_low=0.02, clip_high=0.05,
        correction=("token", "mask", 0.9, 1.1),
    ), LINEAR_ADAM, packing=True),
    "reinforce_baseline, GSPO, centred": Case(Recipe(
        estimator="reinforce_baseline", policy_loss="gspo", clip_low=2e-3, clip_high=5e-3, whiten_std=False,
        kl_coef=0.1, use_kl_loss=True, correction=("sequence", "truncate", 0.8, 1.3),
    )),
    "group_norm": Case(Recipe(
        estimator="group_norm", kl_coef=0.1, kl_estimator="k3", use_kl_loss=True, clip_low=0.02, clip_high=0.03,
        dual_clip=1.1, correction=("geometric", "truncate", 0.98, 1.02),
    ), CLIPPED_ADAM),
    "group_norm, GSPO, centred": Case(Recipe(
        estimator="group_norm", policy_loss="gspo", whiten_std=False, clip_low=3e-3, clip_high=4e-3, kl_coef=0.1,
        kl_estimator="k3", use_kl_loss=True, kl_unbiased_gradient=True,
        correction=("geometric", "mask", 0.98, 1.02),
    )),
    "dr_grpo": Case(Recipe(
        estimator="dr_grpo", kl_coef=0.2, kl_estimator="k2", use_kl_loss=True, clip_low=0.02, clip_high=0.02,
        entropy_coef=0.01,
    )),
    "dr_grpo, CISPO": Case(Recipe(
        estimator="dr_grpo", policy_loss="cispo", reduction="seq_mean_token_mean", kl_coef=0.1, kl_estimator="k2",
        use_kl_loss=True, kl_unbiased_gradient=True, clip_low=0.02, clip_high=0.02,
    ), packing=True),
    "rloo": Case(Recipe(
        estimator="rloo", gamma=0.99, kl_coef=0.1, kl_estimator="k3", clip_low=0.02, clip_high=0.02,
    ), CLIPPED_ADAM),
    "rloo, REINFORCE, own log-probs": Case(Recipe(
        estimator="rloo", policy_loss="reinforce", kl_coef=0.1, kl_estimator="k1", use_kl_loss=True,
        kl_unbiased_gradient=True, old_logprobs="skip", entropy_coef=0.01,
    ), max_epochs=1),
    "lite_ppo, SAPO": Case(Recipe(estimator="lite_ppo", policy_loss="sapo", old_logprobs="rollout"), packing=True),
    "maxrl, DPPO-TV": Case(Recipe(
        estimator="maxrl", policy_loss="dppo_tv", clip_low=1e-4, clip_high=2e-4, old_logprobs="rollout",
        reduction="token_mean",
    ), CLIPPED_ADAM),
    "opo, DPPO-KL": Case(Recipe(
        estimator="opo", policy_loss="dppo_kl", clip_low=1e-5, clip_high=2e-5, old_logprobs="rollout",
    )),
    "remax": Case(Recipe(estimator="remax", clip_low=0.02, clip_high=0.02, old_logprobs="rollout")),
    "online_dpo": Case(Recipe(estimator="online_dpo", kl_coef=0.3, clip_low=0.02, clip_high=0.02)),
    "max_at_k, Kimi": Case(Recipe(
        estimator="max_at_k", policy_loss="kimi", clip_low=0.02, clip_high=0.02, old_logprobs="rollout",
    )),
    "group_norm, GMPO": Case(Recipe(
        estimator="group_norm", policy_loss="gmpo", clip_low=0.02, clip_high=0.02, old_logprobs="rollout",
    ), packing=True),
    "reinforce, TOPR": Case(Recipe(estimator="reinforce", policy_loss="topr", old_logprobs="rollout")),
    "rloo, VESPO": Case(Recipe(estimator="rloo", policy_loss="vespo", old_logprobs="rollout"), packing=True),
    # The engine's log-probs are the ratio's denominator, and the trainer's decide what is masked.
    "gae, engine's log-probs, masked": Case(Recipe(
        estimator="gae", gamma=0.95, lambd=0.9, kl_coef=0.05, clip_low=0.1, clip_high=0.1, old_logprobs="rollout",
        correction=("sequence", "mask", 0.7, 1.4),
    )),
    "rloo, engine's log-probs, masked": Case(Recipe(
        estimator="rloo", clip_low=0.1, clip_high=0.2, old_logprobs="rollout", mask_stale=1,
        correction=("token", "mask", 0.9, 1.1, True),
    ), packing=True),
    "group_norm, GSPO, engine's log-probs, masked": Case(Recipe(
        estimator="group_norm", policy_loss="gspo", clip_low=0.03, clip_high=0.04, old_logprobs="rollout",
        correction=("geometric", "mask", 0.97, 1.03),
    )),
    "dr_grpo, REINFORCE, engine's log-probs": Case(Recipe(
        estimator="dr_grpo", policy_loss="reinforce", old_logprobs="rollout",
        correction=("token", "truncate", 0.9, 1.1),
    ), packing=True),
    # What is too stale for the actor has advantages and a value to learn all the same.
    "gae, stale": Case(Recipe(
        estimator="gae", gamma=0.95, lambd=0.9, kl_coef=0.1, kl_estimator="k3", use_kl_loss=True, clip_low=0.02,
        clip_high=0.02, correction=("sequence", "mask", 0.7, 1.4), mask_stale=0, entropy_coef=0.01,
    ), packing=True),
}  # fmt: skip
# What to change in a recipe to leave a feature out, and a case that has the feature.
FEATURES = {
    "gamma": ("gae", {"gamma": 1.0}),
    "lambda": ("gae", {"lambd": 1.0}),
    "turn gamma": ("gae, centred, CISPO", {"turn_gamma": None}),
    "gamma without a critic": ("reinforce", {"gamma": 1.0}),
    "bootstrap value": ("gae", {"bootstrap_truncated": False}),
    "value clip": ("gae", {"value_clip": None}),
    "dual clip": ("group_norm", {"dual_clip": None}),
    "clip range": ("group_norm", {"clip_low": 0.2, "clip_high": 0.2}),
    "entropy bonus": ("dr_grpo", {"entropy_coef": 0.0}),
    "KL in the reward": ("rloo", {"kl_coef": 0.0}),
    "KL in the loss": ("dr_grpo", {"kl_coef": 0.0, "use_kl_loss": False}),
    "teacher": ("group_norm, teacher", {"teacher_coef": 0.0}),
    "teacher's weight": ("gae, teacher", {"teacher_coef": 0.4}),
    "teacher, whitened": ("reinforce, teacher", {"teacher_coef": 0.0}),
    "teacher's distribution": ("group_norm, teacher's distribution", {"teacher_coef": 0.0}),
    "teacher's likeliest tokens": ("group_norm, teacher's distribution", {"distribution": (6, "reverse_kl", 0.5)}),
    "weight in the JSD": ("dr_grpo, teacher, JSD", {"distribution": (9, "jsd", 0.4)}),
    "direction of the divergence": ("rloo, teacher, forward", {"distribution": (7, "reverse_kl", 0.5)}),
    "filter of responses": ("gae, MIS-PO", {"correction": None}),
    "filter, and no weights": ("gae, MIS-PO", {"correction": ("geometric", "mask", 0.98, 1.02)}),
    "tokens of high entropy": ("group_norm, uncertain tokens", {"top_quantile": None}),
    "share of these tokens": ("dr_grpo, uncertain tokens", {"top_quantile": 0.4}),
    "KL estimator in the reward": ("rloo", {"kl_estimator": "k1"}),
    "KL estimator in the loss": ("group_norm", {"kl_estimator": "k2"}),
    "unbiased gradient": ("dr_grpo, CISPO", {"kl_unbiased_gradient": False}),
    "reduction": ("dr_grpo, CISPO", {"reduction": "token_mean"}),
    "correction's level": ("group_norm", {"correction": ("sequence", "truncate", 0.98, 1.02)}),
    "correction's bounds": ("gae, centred, CISPO", {"correction": ("token", "truncate", 0.5, 2.0)}),
    "correction's mode": ("reinforce, CISPO", {"correction": ("sequence", "truncate", 0.7, 1.4)}),
    "group's deviation": ("group_norm, GSPO, centred", {"whiten_std": True}),
    "mask of the engine's ratio": ("rloo, engine's log-probs, masked", {"correction": None}),
    "mask of the engine's sequences": ("gae, engine's log-probs, masked", {"correction": None}),
    "mask of GSPO's ratio": ("group_norm, GSPO, engine's log-probs, masked", {"correction": None}),
    "weights without a ratio": ("dr_grpo, REINFORCE, engine's log-probs", {"correction": None}),
    "counts of what is masked": ("group_norm, teacher", {"correction": ("token", "mask", 0.9, 1.1, True)}),
    "counts of masked sequences": ("gae, stale", {"correction": ("sequence", "mask", 0.7, 1.4, True)}),
    "counts without what is masked": ("rloo, engine's log-probs, masked", {"correction": ("token", "mask", 0.9, 1.1)}),
    "bound on staleness": ("rloo, engine's log-probs, masked", {"mask_stale": 2}),
    "mask of stale tokens": ("gae, stale", {"mask_stale": None}),
    "trust region": ("maxrl, DPPO-TV", {"clip_low": 0.15, "clip_high": 0.15}),
    "trust region by KL": ("opo, DPPO-KL", {"clip_low": 0.05, "clip_high": 0.05}),
    "batch's deviation": ("gae, centred, CISPO", {"whiten_std": True}),
}
