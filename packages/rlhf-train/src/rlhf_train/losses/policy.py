"""The policy loss of an update, which online algorithms share: its definition.

    loss = R(w_t l_t) + kl_coef R(k_t) - entropy_coef R(H_t) + teacher_coef R(D_t)

    r_t = pi(t) / pi_old(t)                   the ratio of a token
    l_t = -min(r_t A_t, clip(r_t) A_t)        PPO, GRPO, REINFORCE++, RLOO, DAPO; with the ratio of the sequence: GSPO
    l_t = -constant(clip(r_t)) A_t log pi(t)  CISPO
    l_t = -A_t log pi(t)                      REINFORCE
    l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with tau by the sign of A_t                SAPO
    l_t = -r_t A_t, and 0 where pi(t) has moved from pi_old(t) too far, as A_t favours      DPPO, by TV or KL
    l_t = -clip(r_t) A_t + c (log r_t)^2      Kimi K2.5
    l_t = -s_i A_t                            GMPO, s_i the geometric mean of ratios, each clipped as its A_t favours
    l_t = -constant(w_i) A_t log pi(t)        TOPR: w_i = min(s_i, 1) where A_t < 0, else 1
                                              VESPO: w_i = W_i^c1 exp(c2 (1 - W_i)), W_i the product of the ratios

With `mask_off_policy`, l_t is 0 where A_t < 0 and the mean of -log r_t over the response is above the limit.
`penalties` add p_t |log r_t| to l_t (KL-Cov). w_t is 0 for tokens of low entropy with `algorithms.entropy`.
A_t is the advantage, of `algorithms.group` or `algorithms.gae`. w_t corrects for the gap between trainer and engine, of
`algorithms.correction`. k_t estimates the KL to the reference, of `algorithms.kl`. H_t is the entropy, D_t the
divergence from a teacher's distribution, of `losses.teacher`, and R sums over the tokens of the update and divides
by one of its counts. `algorithms.table` has a row for each algorithm.

`rlhf_kernels.ops.packed_policy_loss.reference` has a function of plain torch for each line above, with its source.
Updates compute the loss with the operators `packed_policy_loss` and `linear_policy_loss`, which take packed tokens and,
on GPUs, fuse it with the LM head; on a CPU they are that code. `rlhf_train.losses.own` calls a user's own l_t.
"""
