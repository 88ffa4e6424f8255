"""Online RL on prompts with images: a tiny model learns colours by rewards, and its log-probs are transformers' own."""

import json

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from record_testing import read_jsonl
from rlhf_data.images.files import read_image
from rlhf_data.images.reader import open_image_reader
from tiny_vision import drawn_shapes, tiny_vision_model_dir

AGENT = """
from PIL import Image

class Environment:
    def reset(self, prompt):
        self.turns = 0
        return ""

    def step(self, action):
        self.turns += 1
        # The second picture is in the file of the first.
        Image.new("RGB", (32, 16 * self.turns), ["red", "blue"][self.turns % 2]).save(f"{id(self)}.png")
        picture = {"type": "image_url", "image_url": {"url": f"{id(self)}.png"}}
        return [picture, {"type": "text", "text": "and now?"}], float("a" in action), self.turns == 3, {}
"""
REWARD = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(label in query[len(prompt):]) for query, prompt, label in zip(queries, prompts, labels)]}
"""
IMAGES = "--image_key images --apply_chat_template"
SFT = "--dataset train.jsonl --save_path begun --max_len 160 --zero_stage 0 --learning_rate 3e-3 --max_epochs 3"
SFT += " --train_batch_size 16 --micro_train_batch_size 16"
PPO = "--prompt_data train.jsonl --eval_data held.jsonl --label_key output --remote_rm_url reward.py --save_path out"
PPO += " --advantage_estimator group_norm --rollout_batch_size 16 --n_samples_per_prompt 8 --train_batch_size 64"
PPO += " --train_steps 8 --eval_temperature 1 --micro_train_batch_size 32 --prompt_max_len 160"
PPO += " --generate_max_len 6 --actor_learning_rate 1e-3 --init_kl_coef 0 --seed 1"


def written(folder, name: str, count: int, seed: int) -> None:
    rows = [row for row in drawn_shapes(folder / "pictures", count, seed) if row["input"] == "colour?"]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def largest_gap(path, records) -> float:
    """Return how far recorded log-probs are from those of plain transformers with the model at `path`, in nats."""
    model = AutoModelForImageTextToText.from_pretrained(path)
    processor = open_image_reader(path).processed
    never = torch.arange(512) >= len(AutoTokenizer.from_pretrained(path))  # ids without a token
    never[model.config.image_token_id] = True
    gaps = []
    for record in records:
        made = processor([read_image(ref, "r") for ref in record["images"]])
        arrays = {name: torch.from_numpy(made[name]) for name in ("pixel_values", "pixel_attention_mask")}
        ids = torch.tensor(record["token_ids"])[None]
        with torch.no_grad():
            logits = model(input_ids=ids, **arrays).logits[0, :-1].masked_fill(never, -torch.inf)
        own = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        start = -record["spans"][-1]["num_tokens"]
        gaps.append(np.abs(own[start:] - record["logprobs"][start:]).max())
    return max(gaps)


def test_ppo_teaches_a_model_the_colours_of_drawn_shapes_with_the_logprobs_of_plain_transformers(rlhf, tmp_path):
    tiny_vision_model_dir(tmp_path / "model", "smolvlm")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    written(tmp_path, "train", 400, seed=1)
    written(tmp_path, "held", 100, seed=2)
    rlhf("sft", "--pretrain", "model", *IMAGES.split(), *SFT.split(), folder=tmp_path)
    rlhf("ppo", "--pretrain", "begun/model", *IMAGES.split(), *PPO.split(), folder=tmp_path)

    steps = [line for line in read_jsonl(tmp_path / "out/metrics.jsonl") if "time/step" in line]
    # The tower that reads images is trained, and its outputs of a step must not be those of the step before.
    assert max(step["mismatch/logprob_gap_max"] for step in steps) < 1e-4
    rewards = [step["rollout/reward"] for step in steps]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1

    rollouts = read_jsonl(tmp_path / "out/rollouts.jsonl")
    assert {path for record in rollouts for path in record["images"]} <= set(
        map(str, tmp_path.glob("pictures/1-*.png"))
    )
    first = [record for record in rollouts if record["step"] == 1]
    last = [record for record in read_jsonl(tmp_path / "out/eval_rollouts.jsonl") if record["step"] == len(steps)]
    assert (len(first), len(last)) == (128, len(read_jsonl(tmp_path / "held.jsonl")))
    assert largest_gap(tmp_path / "begun/model", first[::8]) < 2e-5
    assert largest_gap(tmp_path / "out/model", last) < 2e-5
    assert largest_gap(tmp_path / "begun/model", last) > 1e-2


def test_ppo_trains_an_agent_that_shows_images_with_the_logprobs_of_plain_transformers(rlhf, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_vision_model_dir(tmp_path / "model", "smolvlm")
    (tmp_path / "agent.py").write_text(AGENT, encoding="utf-8")
    # Prompts have no images, so that all come from the agent.
    (tmp_path / "train.jsonl").write_text('{"input": "colour?"}\n{"input": "count?"}\n', encoding="utf-8")
    words = "--pretrain model --prompt_data train.jsonl --save_path out --agent_func_path agent.py --max_steps 3"
    words += " --agent_max_len 500 --advantage_estimator group_norm --rollout_batch_size 2 --n_samples_per_prompt 4"
    words += " --train_batch_size 8 --micro_train_batch_size 4 --num_episodes 2 --generate_max_len 4 --packing_samples"
    rlhf("ppo", *words.split(), *IMAGES.split(), "--seed", "1", folder=tmp_path)

    steps = [line for line in read_jsonl(tmp_path / "out/metrics.jsonl") if "time/step" in line]
    assert max(step["mismatch/logprob_gap_max"] for step in steps) < 1e-4
    assert [step["samples/trained"] for step in steps] == [8, 8]
    rollouts = read_jsonl(tmp_path / "out/rollouts.jsonl")
    assert {(len(record["images"]), *record["prompt_images"]) for record in rollouts} == {(2,)}
    assert len({path for record in rollouts for path in record["images"]}) == 2  # by what is in them
    assert largest_gap(tmp_path / "model", [record for record in rollouts if record["step"] == 1]) < 2e-5
