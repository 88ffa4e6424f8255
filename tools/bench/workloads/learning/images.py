"""Held-out accuracy of a model that reads images, before and after `rlhf ppo` on pictures of shapes, by seed.

    python tools/bench/run.py images --model SmolLM2-135M-Instruct --out images.json

The model has the shape of SmolVLM-256M: the given chat model behind a random vision tower, whose output for a picture
stands for 64 tokens. `rlhf sft` on the rows of examples/shapes.py teaches it to see a little. GRPO then goes on with
the same rows, by rewards alone, and trains the tower, too. Held-out pictures are others, and answers to them greedy.
Flags behind `--` go to `rlhf ppo`.
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_rollout.host import local_gpus
from runner import MORE_FLAGS, ROOT, over_seeds
from workloads.learning.published import run, sft

FLAGS = {
    "model": {"type": Path, "required": True, "help": "folder of a chat model of the Llama family"},
    "seeds": [1, 2, 3],
    "rows": (4000, "for training"),
    "held_out": 300,
    "prompts": (64, "per step, each with 8 responses"),
    "steps": 60,
    "eval_steps": 10,
    "epochs": (1, "of sft"),
    "learning_rate": (1e-4, "of sft"),
    "image_size": (512, "pixels of a side of what the tower reads"),
    "vision_layers": 12,
    "vision_width": 768,
    "flags": MORE_FLAGS,
}
_SCRIPT = ROOT / "examples/shapes.py"
_PATCH = 16  # pixels
_SCALE = 4  # squared, patches per token
_IMAGES = "--image_key images --apply_chat_template --packing_samples --micro_batch_tokens 16384"
_SFT = f"{_IMAGES} --output_key label --max_len 512 --train_batch_size 64"
_GRPO = (
    f"{_IMAGES} --label_key label --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0"
    " --old_logprobs skip --eval_temperature 0 --actor_learning_rate 1e-5 --lr_scheduler constant --disable_ds_ckpt"
    " --num_episodes 100 --prompt_max_len 256 --generate_max_len 8"
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}<image>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every seed, and yield the runs until then."""
    on_gpu = ["--bf16"] if local_gpus() else []
    shapes = folder / "shapes"
    words = ["--train", str(options.rows), "--held_out", str(options.held_out)]
    subprocess.run([sys.executable, _SCRIPT, shapes, *words], check=True)
    train, held_out = shapes / "train.jsonl", shapes / "held_out.jsonl"
    sizes = ["--rollout_batch_size", options.prompts, "--train_batch_size", 8 * options.prompts]
    sizes += ["--train_steps", options.steps, "--eval_steps", options.eval_steps]
    data = ["--prompt_data", train, "--eval_data", held_out, "--remote_rm_url", _SCRIPT]
    together = ["--colocate_all_models"] if on_gpu else []
    flags = [str(word) for word in (*_GRPO.split(), *data, *sizes, *on_gpu, *together, *options.flags)]
    runs = []
    for seed in options.seeds:
        told = ["--dataset", str(train), *_SFT.split(), "--max_epochs", str(options.epochs), *on_gpu]
        told += ["--learning_rate", str(options.learning_rate), "--seed", str(seed)]
        start = sft(write_model(options, seed, folder / f"model{seed}"), told, folder / f"sft{seed}")
        runs.append(run(["--pretrain", str(start), *flags, "--seed", str(seed)], folder / f"seed{seed}"))
        yield over_seeds(runs)


def write_model(options: Namespace, seed: int, folder: Path) -> Path:
    """Write the chat model behind a random vision tower, with tokenizer and image processor, and return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    tokenizer.chat_template = _TEMPLATE
    language = AutoModelForCausalLM.from_pretrained(options.model)
    language.resize_token_embeddings(len(tokenizer))
    tower = {
        "hidden_size": options.vision_width,
        "intermediate_size": 4 * options.vision_width,
        "num_hidden_layers": options.vision_layers,
        "num_attention_heads": options.vision_width // 64,
        "image_size": options.image_size,
        "patch_size": _PATCH,
    }
    config = AutoConfig.for_model(
        "smolvlm",
        text_config=language.config.to_dict(),
        vision_config=tower,
        scale_factor=_SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids(_TOKENS[0]),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=language.config.tie_word_embeddings,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = {"longest_edge": options.image_size}
    processor = {"image_processor_type": "SmolVLMImageProcessor", "size": side, "max_image_size": side}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_image_splitting": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder
