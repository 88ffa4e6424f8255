"""What a model has and costs: its weights, and the floating-point operations of a pass. Torch-free."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What one forward pass costs. A backward pass costs twice as much, so that only a factor is left out.

    A sequence of T tokens, R of which are trained, costs

        token_flops * T + target_flops * R + pair_flops * sum over layers of pairs(T, window of the layer)

    where pairs(T, w) = T (T + 1) / 2 - D (D + 1) / 2 with D = max(T - w, 0) counts the keys that the queries see: the
    t-th token sees min(t, w) tokens, itself included. Products of matrices are counted, two operations per
    multiplication; norms, activations and the embedding's look-up are not.

    Attributes:
        token_flops: of the layers' weights, 2 per weight that a token goes through.
        target_flops: of the output head, which runs on trained tokens only.
        pair_flops: of attention, 2 for the score per head and element of its key, and 2 per element of its value.
        windows: number of layers by the tokens that a token sees there, itself included; None for all before it.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, appendix, which has
    the whole square of attention; causal kernels compute its lower half.
    """

    token_flops: int
    target_flops: int
    pair_flops: int
    windows: Mapping[int | None, int]

    def of(self, num_tokens: int, num_targets: int = 0) -> int:
        """Return the cost of a sequence of `num_tokens`, of which `num_targets` are trained."""
        pairs = sum(count * _pairs(num_tokens, window) for window, count in self.windows.items())
        return self.token_flops * num_tokens + self.target_flops * num_targets + self.pair_flops * pairs


def pass_costs(config: Any, *, has_head: bool = True) -> PassCosts:
    """Return the costs of a model with layers of attention and a gated MLP, or a mixture of such MLPs.

    A token goes through the experts that are chosen for it, the shared expert and the router. Layers of another kind,
    such as linear attention, are counted like these, because ranks need only about equal costs. For the same reason a
    field that a config lacks, or has for each layer by itself, gets a usual value.

    Args:
        config: the model's transformers config.
        has_head: whether it predicts tokens. A scalar head costs next to nothing.
    """
    config = config.get_text_config()
    sizes = sizes_of(config)
    attention = sum(rows * columns for rows, columns in attention_linears(config).values())
    mlps = sum(count * _mlp_weights(sizes.hidden, mlp) for mlp, count in mlps_of(config).items())
    window = field(config, "sliding_window")
    kinds = field(config, "layer_types") or ["sliding_attention"] * sizes.num_layers
    return PassCosts(
        token_flops=2 * (sizes.num_layers * attention + mlps),
        target_flops=2 * sizes.hidden * sizes.vocab * has_head,
        pair_flops=2 * sizes.num_heads * sum(head_sizes(config)),
        windows=Counter(window if kind == "sliding_attention" else None for kind in kinds),
    )


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights.

    Attributes:
        matrices: in the layers, experts and routers included.
        experts: the part of `matrices` in experts that tokens are routed to.
        others: embedding, head, norms and biases.
        largest: of the largest single weight, an expert counting by itself.
    """

    matrices: int
    others: int
    largest: int
    experts: int = 0

    @property
    def total(self) -> int:
        """All weights."""
        return self.matrices + self.others


class Mlp(NamedTuple):
    """The MLP of a layer, or its mixture of `num_experts` MLPs.

    Attributes:
        width: of the MLP, or of one expert.
        num_experts: 0 for a plain MLP.
        per_token: experts that a token goes through.
        shared: width of the expert that all tokens go through; 0 for none.
        gates: outputs of the shared expert's gate.
    """

    width: int
    num_experts: int = 0
    per_token: int = 1
    shared: int = 0
    gates: int = 0


class Sizes(NamedTuple):
    """The sizes that all layers of a model have in common."""

    hidden: int
    vocab: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def sizes_of(config: Any) -> Sizes:
    """Return the sizes in the text part of a transformers config."""
    config = config.get_text_config()
    hidden = number(config, "hidden_size", default=1)
    num_heads = number(config, "num_attention_heads", default=1)
    return Sizes(
        hidden,
        number(config, "vocab_size", default=1),
        number(config, "num_hidden_layers", default=1),
        num_heads,
        number(config, "num_key_value_heads", default=num_heads),
        number(config, "head_dim", default=max(hidden // num_heads, 1)),
    )


class Latent(NamedTuple):
    """Attention whose keys and values are products of a short vector per token, the one that a cache holds.

    Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Attributes:
        rank: of keys and values.
        query_rank: of the queries; 0 if one matrix computes them.
        plain, rotary: the parts of a head's query and key without and with positions. All heads share a rotary key.
        value: of a head.
    """

    rank: int
    query_rank: int
    plain: int
    rotary: int
    value: int


def latent_of(config: Any) -> Latent | None:
    """Return the sizes of latent attention in the text part of a config; None for a model without it."""
    config = config.get_text_config()
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = Latent(*(number(config, name, default=0) for name in names))
    return sizes if sizes.rank and sizes.value else None


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the sizes of a head's key and of its value."""
    latent = latent_of(config)
    if latent is None:
        return (sizes_of(config).head_dim,) * 2
    return latent.plain + latent.rotary, latent.value


def cached_size(config: Any, num_parts: int = 1) -> int:
    """Return how many numbers per token and layer the KV cache of an engine of `num_parts` ranks has on each rank."""
    latent = latent_of(config)
    if latent is not None:
        return latent.rank + latent.rotary  # each rank has all of them
    sizes = sizes_of(config)
    return 2 * max(sizes.num_kv_heads // num_parts, 1) * sizes.head_dim


def mlp_of(config: Any, layer: int) -> Mlp:
    """Return the MLP of a layer, by its number from 0."""
    width = number(config, "intermediate_size", default=4 * number(config, "hidden_size", default=1))
    num_experts = number(config, "num_experts", "num_local_experts", default=0)
    is_dense = layer in (field(config, "mlp_only_layers") or ())
    is_dense |= layer < number(config, "first_k_dense_replace", default=0)  # DeepSeek's and GLM's first layers
    is_dense |= "dense" in (field(config, "mlp_layer_types") or ())[layer : layer + 1]
    if not num_experts or is_dense or (layer + 1) % number(config, "decoder_sparse_step", default=1):
        return Mlp(width)
    width = number(config, "moe_intermediate_size", default=width)
    shared = number(config, "shared_expert_intermediate_size", default=0)
    gates = int(shared > 0)
    shared = shared or width * number(config, "n_shared_experts", "num_shared_experts", default=0)
    return Mlp(width, num_experts, number(config, "num_experts_per_tok", default=1), shared, gates)


def mlps_of(config: Any) -> Counter[Mlp]:
    """Return how many layers have which MLP. Fields of a config are slow to read: models of one kind are asked once."""
    num_layers = sizes_of(config).num_layers
    if not number(config, "num_experts", "num_local_experts", default=0):
        return Counter({mlp_of(config, 0): num_layers})
    return Counter(mlp_of(config, layer) for layer in range(num_layers))


def count_parameters(config: Any, *, has_head: bool = True) -> Parameters:
    """Return the weights of a model of the families Llama, Mistral, Mixtral, Qwen2, Qwen3 and their mixtures.

        layer     = attention 2 H D (h + k) + MLP 3 H I + norms 2 H
        mixture   = E experts 3 H I, router E H, shared expert 3 H S, with a gate H in Qwen's, in place of the MLP
        model     = layers + embedding V H + head V H, unless it is the embedding, + norm H

    with hidden size H, h heads of size D, k key-value heads, and V tokens; Qwen2 has biases D (h + 2 k), Qwen3 norms
    2 D. DeepSeek's attention has the matrices of `attention_linears`. Models of other families are counted like these.
    Without a head, the model has one output of H weights. Whether the head is the embedding, the whole config says,
    before its text part.
    """
    whole, config = config, config.get_text_config()
    is_tied = getattr(whole, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False))
    sizes = sizes_of(config)
    hidden = sizes.hidden
    kind = getattr(config, "model_type", "")
    vectors = 2 * hidden
    if kind.startswith("qwen3"):
        vectors += 2 * sizes.head_dim
    latent = latent_of(config)
    if latent is not None:
        vectors += latent.rank + latent.query_rank  # norms
    if kind.startswith("qwen2") or getattr(config, "attention_bias", False):
        vectors += sizes.head_dim * (sizes.num_heads + 2 * sizes.num_kv_heads)
    if not kind.startswith("qwen2") and getattr(config, "attention_bias", False):
        vectors += hidden  # of the output
    matrices = 0
    experts = 0
    biases = 0
    largest = sizes.vocab * hidden
    for mlp, count in mlps_of(config).items():
        of_layer = sum(rows * columns for rows, columns in linears_of(config, mlp).values())
        of_experts = mlp.num_experts * hidden * 3 * mlp.width
        experts += count * of_experts
        matrices += count * (of_layer + of_experts + mlp.num_experts * hidden)
        biases += count * (2 * mlp.width + hidden) * bool(getattr(config, "mlp_bias", False))
        largest = max(largest, hidden * mlp.width)
    num_tables = 1 + (has_head and not is_tied)
    others = sizes.num_layers * vectors + biases + num_tables * sizes.vocab * hidden + hidden
    return Parameters(matrices, others + (0 if has_head else hidden), largest, experts)


def linears_of(config: Any, mlp: Mlp) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear modules of a layer, by name. Experts and routers are none."""
    hidden = sizes_of(config).hidden
    width = mlp.shared if mlp.num_experts else mlp.width
    linears = attention_linears(config)
    if width:
        linears |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, width)) | {"down_proj": (width, hidden)}
    return linears | ({"shared_expert_gate": (hidden, mlp.gates)} if mlp.gates else {})


def attention_linears(config: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear modules of a layer's attention, by name."""
    hidden, _, _, num_heads, num_kv_heads, head_dim = sizes_of(config)
    latent = latent_of(config)
    if latent is None:
        linears = {"q_proj": (hidden, num_heads * head_dim), "o_proj": (num_heads * head_dim, hidden)}
        return linears | dict.fromkeys(("k_proj", "v_proj"), (hidden, num_kv_heads * head_dim))
    queries = num_heads * (latent.plain + latent.rotary)
    linears = {
        "kv_a_proj_with_mqa": (hidden, latent.rank + latent.rotary),
        "kv_b_proj": (latent.rank, num_heads * (latent.plain + latent.value)),
        "o_proj": (num_heads * latent.value, hidden),
    }
    if latent.query_rank:
        return linears | {"q_a_proj": (hidden, latent.query_rank), "q_b_proj": (latent.query_rank, queries)}
    return linears | {"q_proj": (hidden, queries)}


def count_linear_weights(config: Any) -> int:
    """Return the weights of the linear modules of the layers."""
    config = config.get_text_config()
    return sum(
        count * sum(a * b for a, b in linears_of(config, mlp).values()) for mlp, count in mlps_of(config).items()
    )


def count_adapters(config: Any, rank: int, targets: str | Sequence[str]) -> int:
    """Return the weights of LoRA adapters: rank (inputs + outputs) for each linear module of the layers in `targets`,
    by their last name, or for all of them with "all-linear"."""
    config = config.get_text_config()
    wanted = None if targets == "all-linear" else {targets} if isinstance(targets, str) else set(targets)
    total = 0
    for mlp, count in mlps_of(config).items():
        sizes = (size for name, size in linears_of(config, mlp).items() if wanted is None or name in wanted)
        total += count * rank * sum(map(sum, sizes))
    return total


def _mlp_weights(hidden: int, mlp: Mlp) -> int:
    """Return the weights of a layer's MLP that a token goes through."""
    num_outputs = mlp.num_experts + mlp.gates  # of the router, and the gate of the shared expert
    return hidden * (3 * (mlp.width * mlp.per_token + mlp.shared) + num_outputs)


def number(config: Any, *names: str, default: int) -> int:
    """Return the first field that is set to a number: configs leave out what is usual, and some have lists."""
    values = (field(config, name) for name in names)
    return next((value for value in values if value and isinstance(value, int)), default)


def field(config: Any, name: str) -> Any:
    """Return a field; None if the config lacks it, or has it for each layer, where transformers raises RuntimeError."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _pairs(num_tokens: int, window: int | None) -> int:
    hidden = 0 if window is None else max(num_tokens - window, 0)
    return (num_tokens * (num_tokens + 1) - hidden * (hidden + 1)) // 2
