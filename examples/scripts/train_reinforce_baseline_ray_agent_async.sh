#!/usr/bin/env bash
# REINFORCE++-baseline for an agent with several turns; engines generate while models train.
#
#   examples/scripts/train_reinforce_baseline_ray_agent_async.sh    the built-in model, 5 steps on CPU cores
#   MODEL=org/model PROMPTS=prompts.jsonl AGENT=agent.py GPUS=4 examples/scripts/train_reinforce_baseline_ray_agent_async.sh
#
# PROMPTS has the keys `input` and `label`; AGENT is the file, examples/math_retries.py unless set. GPUS train, and as many
# more generate. Arguments go to `rlhf ppo` and win over the flags below. RLHF is the command, `rlhf` unless set.
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

flags=(--advantage_estimator reinforce_baseline --n_samples_per_prompt 4 --init_kl_coef 0
  --agent_func_path "${AGENT:-$examples/math_retries.py}" --max_steps 3 --async_train)
if [[ -n ${MODEL:-} ]]; then
  flags+=(--pretrain "$MODEL" --prompt_data "$PROMPTS" --label_key label --apply_chat_template --agent_max_len 8192
    --rollout_batch_size 128 --train_batch_size 512 --micro_train_batch_size 4 --micro_rollout_batch_size 8)
else
  flags+=(--agent_max_len 192 --train_steps 5)
fi
if [[ -n ${GPUS:-} ]]; then
  flags+=(--bf16 --packing_samples --gradient_checkpointing --zero_stage 3
    --actor_num_gpus_per_node "$GPUS" --vllm_num_engines "$GPUS")
fi
exec ${RLHF:-rlhf} ppo "${flags[@]}" "$@"
