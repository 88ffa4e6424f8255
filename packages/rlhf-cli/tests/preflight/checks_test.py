"""What the checks across options refuse, and what they tell: losses, KL, corrections, rewards, filters, models."""

import pytest

from rlhf_cli.commands.ppo import lowest_layer
from rlhf_cli.config.ppo import PpoConfig
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import CommandLine, Parsed
from rlhf_data.options.exits import with_flags

FP8 = "--vllm_quantization fp8 --bf16"
GRPO = "--advantage_estimator group_norm"
SKIP = "--old_logprobs skip --init_kl_coef 0"
ONE_UPDATE = "--train_batch_size 128"
TAUGHT = "--remote_rm_url None --teacher_model m"
JUDGE = "--judge_url http://127.0.0.1/v1 --judge_model m"
PAIRWISE = "--remote_rm_url pairwise:r.txt"
EACH = "--remote_rm_url a.py,b.py --reward_normalize each"
BY_TURN = "--group_by turn"
ONE_TURN = "--agent_func_path agents:Two --max_steps 1"
MODEL_ONLY = "--remote_rm_url None --reward_pretrain m"


def ppo(*argv: str) -> Parsed[PpoConfig]:
    return CommandLine(config=PpoConfig, prog="rlhf ppo", recipe=lowest_layer).parse(argv)


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        # what is needed, batches, sampling
        ("--pretrain m", "--prompt_data is missing", "add --prompt_data FILE.jsonl"),
        ("--prompt_data p.jsonl", "--pretrain is missing", "--pretrain builtin"),
        ("--pretrain m --prompt_data p.jsonl", "--remote_rm_url is missing", "reward_func(queries, prompts, labels)"),
        # 32 x 4 = 128 samples; of the divisors of 128, 32 is the largest that is not above 48.
        ("--train_batch_size 48", "does not divide the 128 samples of a step", "use --train_batch_size 32"),
        ("--use_kl_loss --init_kl_coef 0", "the coefficient of the KL is 0", "set --init_kl_coef above 0"),
        ("--top_p 0.9 --old_logprobs rollout", "--top_p 0.9 samples from a part of the distribution", "use --top_p 1"),
        ("--top_k 20 --is_correction_level token", "--top_k 20 samples from a part of", "--is_correction_level off"),
        ("--min_p 0.1 --old_logprobs rollout", "--min_p 0.1 samples from a part", "use --min_p 0; or --old_logprobs"),
        (
            "--repetition_penalty 1.2 --top_k 9 --is_correction_level sequence",
            "--top_k 9 and --repetition_penalty 1.2 samples from a changed distribution, and --is_correction_level",
            "use --top_k -1 --repetition_penalty 1; or",
        ),
        ("--repetition_penalty 0.9 --async_train", "--old_logprobs rollout compares", "--repetition_penalty 1"),
        ("--eval_temperature 0 --eval_n_samples_per_prompt 2", "greedy responses are all the same", "use 1"),
        # sleep
        *(
            (f"--async_train --colocate_all_models {flag}", f"{flag} lets them sleep in turn", "drop one of them")
            for flag in ("--vllm_enable_sleep", "--deepspeed_enable_sleep")
        ),
        # the policy loss
        ("--clip_eps_low 0.1 --eps_clip 0.1", "--eps_clip and --clip_eps_low set the same", "give one"),
        ("--eps_clip_low_high 0.1 0.2 --clip_eps_high 0.1", "--clip_eps_high set the same", "give one"),
        (f"--old_logprobs skip {ONE_UPDATE}", "leaves nothing to compute the reward's KL penalty", "add --use_kl_loss"),
        # the KL
        ("--kl_target 0.1 --init_kl_coef 0", "--kl_target with --init_kl_coef 0", "set --init_kl_coef above"),
        ("--kl_unbiased_gradient", "--use_kl_loss is off", "add --use_kl_loss"),
        # corrections
        (
            "--is_correction_level token --old_logprobs rollout",
            "with --old_logprobs rollout the ratio of PPO clip is current / engine",
            "use --is_correction_mode mask, or --old_logprobs recompute",
        ),
        (
            f"{SKIP} {ONE_UPDATE} --is_correction_level token --is_correction_mode mask",
            "an importance correction needs log-probs of the policy before the update",
            "use --old_logprobs recompute",
        ),
        (
            f"{SKIP} {ONE_UPDATE} --is_reject max_k2 --is_reject_threshold 0 1",
            "an importance correction",
            "--is_reject off",
        ),
        ("--is_reject geometric", "--is_reject_threshold is 0 inf", "0.5 5 for the geometric mean of weights"),
        (
            "--top_k 9 --is_reject max_k2 --is_reject_threshold 0 1",
            "--is_reject max_k2 compares its log-probs with those of the whole",
            "--is_correction_level off --is_reject off",
        ),
        ("--vllm_quantization fp8", "--vllm_quantization fp8 rounds bfloat16 weights", "add --bf16"),
        ("--is_correction_threshold -1 3", "--is_correction_threshold is -1 3", "LOW before HIGH"),
        # rewards
        ("--remote_rm_url None", "--remote_rm_url is missing", "or --reward_pretrain MODEL"),
        ("--reward_weights 1,2", "2 weights for 1 rewards", "give one weight per reward"),
        ("--reward_weights much", "--reward_weights is much; it must be numbers", ""),
        ("--reward_weights -1,1", "--reward_weights: `-1,1` begins with `-`", "write --reward_weights=-1,1"),
        ("--reward_by_turn --running_reward_norm", "and --reward_by_turn gives several", "drop one of them"),
        ("--reward_clip_range 1 1", "--reward_clip_range is 1 1", "LOW before HIGH"),
        ("--reward_clip_range -10", "--reward_clip_range: -10 is one number, which must be above 0", "LOW HIGH"),
        ("--reward_clip_range x", "--reward_clip_range is x; it must be a number", ""),
        ("--reward_clip_range 0", "--reward_clip_range: 0 is one number", "LOW HIGH"),
        ("--overlong_buffer_len 33", "is 33 of the 32 tokens", "give 1 to 32 tokens"),
        ("--overlong_buffer_len 0.01", "--overlong_buffer_len 0.01 is 0 of the 32 tokens", "give 1 to 32"),
        (PAIRWISE, "--judge_url is missing: a judge scores", "give --judge_url https://HOST/v1 and --judge_model NAME"),
        ("--reward_normalize each", "there are 1 rewards and 4 responses per prompt", "give several rewards"),
        (f"{EACH} --n_samples_per_prompt 1", "there are 2 rewards and 1 responses per", "--n_samples_per_prompt 4"),
        *(
            (f"{EACH} --{flag}", f"--{flag.split()[0]} changes the sum of the rewards", "drop one of them")
            for flag in (
                "running_reward_norm",
                "reward_clip_range 5",
                "overlong_buffer_len 8",
                "stop_properly_penalty_coef 0.5",
            )
        ),
        (
            f"{SKIP} {ONE_UPDATE} --mask_off_policy 0.5",
            "--mask_off_policy needs log-probs of the policy before the update, which --old_logprobs skip leaves out",
            "use --old_logprobs recompute, or rollout",
        ),
        (
            "--advantage_estimator remax --reward_clip_range 5",
            "--reward_clip_range changes the rewards that are trained, and not that of ReMax's greedy response",
            "drop it, or use --advantage_estimator rloo",
        ),
        ("--clip_cov 1 1 5", "--clip_cov is 1 1 5: a share in (0, 1)", "verl uses 2e-4 1 5"),
        ("--kl_cov 0.1 0", "--kl_cov is 0.1 0: a share in (0, 1)", "verl's default is 2e-4 0.1"),
        (f"{SKIP} {ONE_UPDATE} --kl_cov 0.1 1", "Clip-Cov or KL-Cov needs log-probs", "recompute, or rollout"),
        (
            f"{SKIP} {ONE_UPDATE} --top_entropy_quantile 0.2",
            "or --entropy_target needs log-probs",
            "recompute, or rollout",
        ),
        ("--clip_cov 0.1 5 1", "and LOW below HIGH are needed", "verl uses"),
        (BY_TURN, "and PPO has no baseline of a group", "use --advantage_estimator group_norm, dr_grpo"),
        (f"{GRPO} {BY_TURN} --gamma 0.9", "and --gamma 0.9 discounts by token", "--turn_gamma, and drop --gamma"),
        (f"{GRPO} {BY_TURN} {EACH}", "turn by turn, and --reward_normalize each compares those of whole", "drop one"),
        (f"{GRPO} {BY_TURN} --reward_normalize none", "turn by turn, and --reward_normalize none", "drop one of them"),
        (f"{EACH} --no_advantage_std_norm", "--no_advantage_std_norm forbids it", "drop one of them"),
        (f"{PAIRWISE} {JUDGE} --n_samples_per_prompt 1", "a pairwise judge compares", "judge:FILE"),
        # dynamic sampling
        (
            "--dynamic_filtering --dynamic_filtering_reward_range 1 0",
            "--dynamic_filtering_reward_range is 1 0",
            "LOW before HIGH",
        ),
        (f"{MODEL_ONLY} --difficulty_pool", "--difficulty_pool counts responses that", "add --success_threshold SCORE"),
        (f"{MODEL_ONLY} --adaptive_mix", "--adaptive_mix counts responses that are right", "add --success_threshold"),
        ("--adaptive_mix --difficulty_pool", "both decide the next prompt", "drop one of them"),
        ("--adaptive_mix --prompt_data_probs 1,2", "the shares that --prompt_data_probs fixes", "drop one of them"),
        (f"{MODEL_ONLY} --reuse_solved 9", "--reuse_solved counts responses that are right", "add --success_threshold"),
        *(
            (f"--reuse_solved 9 {flags}", f"answers of earlier steps, and {reason}", "drop one of them")
            for flags, reason in (
                ("--async_train", "--async_train bounds"),
                (ONE_TURN, "--agent_func_path makes"),
                ("--n_samples_per_prompt 1 --train_batch_size 32", "--n_samples_per_prompt 1 leaves"),
                ("--advantage_estimator remax", "--advantage_estimator remax compares"),
                (f"{PAIRWISE} {JUDGE}", "a pairwise judge compares"),
                ("--routing_replay", "--routing_replay knows"),
                ("--image_key i", "--image_key is not tested"),
                ("--mask_stale 99", "--mask_stale 99 leaves out tokens that --reuse_max_age 100 keeps"),
            )
        ),
        (f"--reuse_solved 9 {SKIP} {ONE_UPDATE}", "rollouts may be stale", "recompute, or rollout"),
        # the teacher
        (f"{TAUGHT} --difficulty_pool", "--difficulty_pool compares scores, and nothing", "--reward_weights 0"),
        (f"{TAUGHT} --reuse_solved 9", "--reuse_solved compares scores, and nothing scores", "--reward_weights 0"),
        (f"{TAUGHT} --adaptive_mix", "--adaptive_mix compares scores, and nothing scores", "--reward_weights 0"),
        (f"{TAUGHT} --dynamic_filtering", "--dynamic_filtering compares scores, and nothing", "--reward_weights 0"),
        (f"{TAUGHT} --best_metric_key eval/accuracy", "--best_metric_key compares scores", "add --remote_rm_url"),
        (
            f"{TAUGHT} --init_kl_coef 0 --old_logprobs skip {ONE_UPDATE}",
            "a teacher's log-ratio needs log-probs",
            "recompute",
        ),
        ("--teacher_model a=", "--teacher_model a= lacks a data source or a model", "write SOURCE=MODEL for each"),
        ("--teacher_model ,", "--teacher_model , names no model", "write SOURCE=MODEL for each"),
        ("--teacher_model a=m,a=n", "two models for the data source a: m and n", "write SOURCE=MODEL for each"),
        ("--teacher_model a=m,n,o", "two models for all sources without one: n and o", "at most one MODEL alone"),
        ("--teacher_model ema", "ema is the average of the policy's weights, and", "add --enable_ema"),
        ("--remote_rm_url None --teacher_model ema --enable_ema", "ema begins as the policy", "add --remote_rm_url"),
        ("--reward_weights 0 --teacher_model ema --enable_ema", "ema begins as the policy", "a weight that is not 0"),
        ("--reward_weights 0", "--reward_weights are 0, and without --teacher_model", "give a reward another weight"),
        # training, evaluation, placement
        (f"{GRPO} --freezing_actor_steps 3", "GRPO (group_norm) has none", "--advantage_estimator gae"),
        ("--eval_data None --best_metric_key eval/pass@1", "--eval_data is missing", "add --eval_data FILE.jsonl"),
    ],
)
def test_check_ppo_what_cannot_work_is_an_error_with_a_hint(argv, message, hint):
    with pytest.raises(ConfigError) as caught:
        ppo(*argv.split())
    text, _, given_hint = with_flags(str(caught.value)).partition("\n\nhint: ")
    assert message in text
    assert hint in given_hint


@pytest.mark.parametrize(
    ("argv", "notice"),
    [
        ("--policy_loss_type gspo", "--policy_loss_type gspo clips the ratio to 1 - 0.0003 and 1 + 0.0004"),
        ("--policy_loss_type gspo --eps_clip 0.2", "--policy_loss_type gspo: the mean ratio of a response"),
        ("--policy_loss_type cispo", "--policy_loss_type cispo: --clip_eps_high is 0.2; its paper tunes it"),
        ("--policy_loss_type sapo --eps_clip 0.1", "--eps_clip has no effect: --policy_loss_type sapo does not clip"),
        ("--sapo_tau 1 2", "--sapo_tau has no effect: --policy_loss_type ppo has no gate"),
        ("--log_ratio_coef 1", "--log_ratio_coef has no effect: --policy_loss_type ppo has no squared log ratio"),
        ("--policy_loss_type reinforce", "--policy_loss_type reinforce does not use the policy ratio, so nothing"),
        (f"{SKIP} {ONE_UPDATE} --eps_clip 0.1", "--eps_clip has no effect: with one update per step the policy"),
        (f"--init_kl_coef 0 {ONE_UPDATE} --dual_clip 3", "--dual_clip has no effect: with one update per step the"),
        ("--lora_alpha 8", "--lora_alpha has no effect: --lora_rank is 0"),
        ("--lora_rank 8 --ref_num_nodes 2", "--ref_num_nodes has no effect: with --lora_rank the reference"),
        ("--kl_horizon 500", "--kl_horizon has no effect: there is no --kl_target"),
        ("--teacher_coef 2", "--teacher_coef has no effect: there is no --teacher_model"),
        ("--entropy_coef_step 1", "--entropy_coef_step has no effect: there is no --entropy_target"),
        ("--old_logprobs rollout --entropy_target 1", "--old_logprobs rollout saves no forward pass with"),
        ("--teacher_top_k 2", "--teacher_top_k has no effect: there is no --teacher_model"),
        (f"{TAUGHT} --kd_divergence jsd", "--kd_divergence has no effect: there is no --teacher_top_k"),
        (f"{TAUGHT} --teacher_top_k 9 --jsd_beta 0.1", "--jsd_beta has no effect: --kd_divergence is reverse_kl"),
        ("--teacher_num_nodes 2", "--teacher_num_nodes has no effect: there is no --teacher_model"),
        (
            "--init_kl_coef 0 --teacher_model ema --enable_ema --ref_reward_offload",
            "--ref_reward_offload has no effect: all models of this run are trained",
        ),
        (f"{TAUGHT} --running_reward_norm", "--running_reward_norm has no effect: there is no reward, only --teacher"),
        (TAUGHT, "PPO (gae) trains a critic, and without a reward it has nothing to predict but penalties"),
        (f"{GRPO} --bootstrap_truncated", "--bootstrap_truncated has no effect: GRPO (group_norm) has no critic"),
        (
            "--old_logprobs rollout --is_correction_level token --is_correction_mode mask",
            "--old_logprobs rollout saves no forward pass with --is_correction_level token",
        ),
        ("--is_correction_mode mask", "--is_correction_mode has no effect: --is_correction_level is off"),
        ("--is_reject_threshold 0 3", "--is_reject_threshold has no effect: --is_reject is off"),
        ("--is_correction_level token --is_correction_drop_masked", "--is_correction_drop_masked has no effect"),
        ("--old_logprobs rollout --is_reject mean_k3 --is_reject_threshold 0 0.1", "--old_logprobs rollout saves no"),
        ("--is_correction_threshold 0 3", "--is_correction_threshold has no effect: --is_correction_level is"),
        ("--step_separator .", "--step_separator has no effect: there is no --reward_pretrain"),
        (f"{MODEL_ONLY} --reward_by_turn", "--reward_by_turn has no effect: there is no --agent_func_path"),
        (f"{GRPO} {BY_TURN}", "--group_by has no effect: there is no --agent_func_path"),
        ("--agent_func_path agents:Two --state_coef 0.5", "--state_coef has no effect: --group_by is episode"),
        ("--turn_gamma 0.5", "--turn_gamma has no effect: there is no --agent_func_path"),
        (f"{ONE_TURN} {GRPO} {BY_TURN}", "--group_by has no effect: --max_steps is 1"),
        (f"{ONE_TURN} {GRPO} --group_by state", "--group_by state compares single turns as it compares their episodes"),
        (f"{ONE_TURN} --turn_gamma 0.5", "--turn_gamma has no effect: --max_steps is 1"),
        (f"{MODEL_ONLY} --reward_timeout_s 3", "--reward_timeout_s has no effect: no reward function or server"),
        (f"{MODEL_ONLY} --reward_num_workers 3", "--reward_num_workers has no effect: no reward function scores"),
        ("--reward_normalize none", "--reward_normalize has no effect: PPO (gae) compares no rewards within a"),
        (f"{PAIRWISE} {JUDGE}", "accuracy and pass@k follow the judge, r: a score of at least 1"),
        (f"{PAIRWISE} {JUDGE}", "the mean reward of a pairwise judge is always 0.5"),
        ("--judge_model m", "--judge_model has no effect: no judge scores"),
        (f"{GRPO} --running_reward_norm", "--running_reward_norm has no effect: GRPO (group_norm) shifts and scales"),
        (MODEL_ONLY, "accuracy and pass@k follow the reward model, m: a score of at least 1 (--success_threshold)"),
        ("--remote_rm_url a/b.py,c.py --success_threshold 0.5", "accuracy and pass@k follow the first of 2 rewards, b"),
        (f"{MODEL_ONLY} --dynamic_filtering", "--dynamic_filtering leaves out prompts whose responses all have the"),
        ("--reward_batch_size 3", "--reward_batch_size has no effect: no own function, server or model scores"),
        ("--overlong_penalty_factor 2", "--overlong_penalty_factor has no effect: there is no --overlong_buffer"),
        ("--stop_properly_penalty_coef 1", "--stop_properly_penalty_coef has no effect"),
        ("--dynamic_filtering_max_batches 3", "--dynamic_filtering_max_batches has no effect: --dynamic_filtering"),
        ("--dynamic_filtering_reward_range 0 1", "--dynamic_filtering_reward_range has no effect"),
        ("--target_pass_rate 0.3", "--target_pass_rate has no effect: --difficulty_pool is off"),
        ("--mix_window 3", "--mix_window has no effect: --adaptive_mix is off"),
        ("--reuse_solved 9 --mask_stale 100", "--mask_stale has no effect: no token is more than 100 steps old"),
        ("--reuse_max_age 3", "--reuse_max_age has no effect: there is no --reuse_solved"),
        ("--reuse_solved 9 --old_logprobs recompute", "--reuse_solved trains on answers of older weights, and nothing"),
        (f"--mask_off_policy 0.5 --old_logprobs recompute {ONE_UPDATE}", "--mask_off_policy has no effect: the only"),
        ("--mask_stale 0", "--mask_stale has no effect: no token is more than 0 steps old"),
        (f"{GRPO} --early_forwards --init_kl_coef 0 --old_logprobs rollout", "--early_forwards has no effect: no"),
        ("--mask_stale 2 --async_train --max_staleness 2", "--mask_stale has no effect: no token is more than 2 steps"),
        ("--async_train --old_logprobs recompute", "--async_train trains on tokens of older weights, and nothing"),
        (
            f"--async_train --policy_loss_type reinforce --old_logprobs rollout {ONE_UPDATE}",
            "--async_train trains on tokens of older weights, and nothing corrects for their probabilities:"
            " --is_correction_level token does",
        ),
        (FP8, "--vllm_quantization fp8 samples tokens from rounded weights: --is_correction_level is token, which"),
        (f"{FP8} --is_correction_level off --old_logprobs recompute", "--vllm_quantization fp8 samples tokens from"),
        ("--vllm_speculative ngram", "--vllm_speculative ngram: engines do without the speed-ups of single tokens"),
        ("--vllm_speculative_tokens 3", "--vllm_speculative_tokens has no effect: there is no --vllm_speculative or"),
        ("--ema_beta 0.9", "--ema_beta has no effect: --enable_ema is off"),
        ("--eval_data None --source_key set", "--source_key has no effect: there is no --eval_data"),
        ("--best_metric_key eval/pass@1 --eval_steps -1", "--best_metric_key can only choose between the first and"),
        ("--best_metric_key eval/truncated", "--best_metric_key eval/truncated keeps the highest value"),
        ("--reward_num_nodes 2", "--reward_num_nodes has no effect: there is no --reward_pretrain"),
        ("--colocate_critic_reward", "--colocate_critic_reward has no effect: there is no --reward_pretrain"),
        (f"{GRPO} --reward_pretrain m --colocate_critic_reward", "--colocate_critic_reward has no effect: GRPO"),
        ("--reward_pretrain m --colocate_critic_reward --colocate_all_models", "--colocate_critic_reward has no"),
        ("--advantage_estimator group_norm --lambd 0.9", "--lambd has no effect: GRPO (group_norm) has no"),
        ("--advantage_estimator group_norm --critic_learning_rate 1", "--critic_learning_rate has no effect"),
        ("--advantage_estimator rloo --no_advantage_std_norm", "--no_advantage_std_norm has no effect: RLOO"),
        ("--init_kl_coef 0 --kl_estimator k2", "--kl_estimator has no effect: --init_kl_coef is 0"),
        ("--use_kl_loss", "--use_kl_loss with --kl_estimator k1: the gradient of k1 averages to 0"),
        ("--overlap_comm", "--overlap_comm has no effect: --zero_stage is 2"),
        ("--lr_scheduler linear --min_lr_ratio 0", "--min_lr_ratio has no effect: --lr_scheduler is linear"),
        ("--eval_data None --eval_steps 5", "--eval_steps has no effect: there is no --eval_data"),
        ("--colocate_all_models --colocate_actor_ref", "--colocate_actor_ref has no effect"),
        ("--vllm_enable_sleep", "--vllm_enable_sleep has no effect: --colocate_all_models is off, so"),
        ("--top_p 0.9", "--top_p 0.9 samples from a part of the distribution"),
        ("--repetition_penalty 1.1", "--repetition_penalty 1.1 samples from a changed distribution"),
        ("--init_kl_coef 0 --ref_reward_offload", "--ref_reward_offload has no effect: all models of this run"),
    ],
)
def test_check_ppo_what_has_no_effect_is_a_notice(argv, notice):
    notices = ppo(*argv.split()).notices
    assert [text for text in notices if text.startswith(notice)], notices
    assert len(notices) == len(set(notices))
