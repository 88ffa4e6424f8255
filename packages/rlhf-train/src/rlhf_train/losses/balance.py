"""The load-balancing loss of mixture-of-experts models."""

from torch import Tensor


def balance_loss(probs: Tensor, counts: Tensor, num_rows: Tensor) -> Tensor:
    """Return a pass's share of the load-balancing loss of an update.

        loss = E sum_e f_e P_e,    f_e = counts_e / num_rows,    P_e = (sum over passes and ranks of probs_e) / num_rows

    P_e is linear in the tokens, and f_e is a constant of the update. Hence the shares of all passes and ranks add up to
    the loss, however tokens are split over them. For an update of one pass the loss is that of transformers'
    `load_balancing_loss_func`. When all experts are used equally, it is k, the experts per token.

    Args:
        probs: [E] float, router probabilities of each expert, summed over the pass's tokens and over layers; carries
            the gradient.
        counts: [E] float, how often each expert was chosen, over all passes and ranks of the update and over layers.
        num_rows: scalar, tokens times layers, over all passes and ranks. With 0 the loss is 0.

    Returns:
        A scalar of the type of `probs`.

    Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6; over all tokens of an update as in Qiu et al. 2025,
    arXiv:2501.11873, section 3.
    """
    rows = num_rows.clamp(min=1)
    return len(counts) * ((counts / rows) * (probs / rows)).sum()
