#!/usr/bin/env bash
# REINFORCE++-baseline with a rule as the reward, without a critic; models and engines share the GPUs and take turns.
#
#   examples/scripts/train_reinforce_baseline_hybrid_engine.sh      the built-in model, 5 steps on CPU cores
#   MODEL=org/model PROMPTS=prompts.jsonl GPUS=8 examples/scripts/train_reinforce_baseline_hybrid_engine.sh
#
# PROMPTS has the keys `input` and `label`; RULE is the reward, `math` unless set.
# Arguments go to `rlhf ppo` and win over the flags below. RLHF is the command, `rlhf` unless set.
set -euo pipefail

flags=(--advantage_estimator reinforce_baseline --n_samples_per_prompt 4
  --use_kl_loss --kl_estimator k2 --init_kl_coef 1e-3 --remote_rm_url "${RULE:-math}")
if [[ -n ${MODEL:-} ]]; then
  flags+=(--pretrain "$MODEL" --prompt_data "$PROMPTS" --label_key label --apply_chat_template
    --rollout_batch_size 128 --train_batch_size 512 --micro_train_batch_size 4 --micro_rollout_batch_size 8)
else
  flags+=(--train_steps 5)
fi
if [[ -n ${GPUS:-} ]]; then
  flags+=(--bf16 --packing_samples --gradient_checkpointing --zero_stage 3
    --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep
    --actor_num_gpus_per_node "$GPUS" --vllm_num_engines "$GPUS" --vllm_gpu_memory_utilization 0.5)
fi
exec ${RLHF:-rlhf} ppo "${flags[@]}" "$@"
