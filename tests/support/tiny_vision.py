"""Tiny random models that read images, with their processors, and pictures of shapes to ask them about."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As SmolVLM has it: it writes nothing of a content that is text instead of parts.
_SMOL_TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
    "{% if m.content[0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for c in m.content %}{% if c['type'] == 'text' %}{{ c['text'] }}{% elif c['type'] == 'image' %}<image>"
    "{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_PINPOINTS = [[32, 32], [32, 64], [64, 32], [64, 64], [32, 192], [192, 192]]
_QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
_QWEN_TOKENS += ["<|image_pad|>", "<|video_pad|>"]
_INTERN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<IMG_CONTEXT>\n{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_INTERN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
_SMOL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>"]
_SMOL_TOKENS += ["<global-img>"]
_SMOL_TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
_EYE = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_OUT = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
_EYES: dict[str, dict[str, Any]] = {
    "qwen2_vl": _EYE | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": _EYE | _OUT | {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": _EYE | _OUT | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    "smolvlm": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    },
}
_EYES["idefics3"] = _EYES["smolvlm"]
_EYES["internvl"] = _EYES["smolvlm"] | {"image_size": [32, 32], "patch_size": [4, 4], "use_qk_norm": True}
_EYES["llava_onevision"] = _EYES["smolvlm"] | {"model_type": "siglip_vision_model", "vision_use_head": False}
_EYES["gemma3"] = _EYES["smolvlm"] | {"vision_use_head": False}
VISION_FAMILIES = tuple(_EYES)
# By family, what its tokenizer has: special tokens, the chat template, the end token, the token of an image.
_SMOL = (_SMOL_TOKENS, _SMOL_TEMPLATE, "<end_of_utterance>", "<image>")
_TEXTS = {"smolvlm": _SMOL, "idefics3": _SMOL}
_TEXTS["internvl"] = (_INTERN_TOKENS, _INTERN_TEMPLATE, "<|im_end|>", "<IMG_CONTEXT>")
_LLAVA_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
_TEXTS["llava_onevision"] = (
    _LLAVA_TOKENS,
    _INTERN_TEMPLATE.replace("<IMG_CONTEXT>", "<image>"),
    "<|im_end|>",
    "<image>",
)
_GEMMA_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
]
_GEMMA_TEMPLATE = _INTERN_TEMPLATE.replace("<IMG_CONTEXT>\n", "<start_of_image>")
_TEXTS["gemma3"] = (_GEMMA_TOKENS, _GEMMA_TEMPLATE, "<|im_end|>", "<image_soft_token>")
_QWEN = (_QWEN_TOKENS, _QWEN_TEMPLATE, "<|im_end|>", "<|image_pad|>")
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (30, 30, 220)}


def tiny_vision_model_dir(path: Path, family: str) -> Path:
    """Write a random model of one of `VISION_FAMILIES` with tokenizer and image processor, and return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from rlhf_models.checkpoint.files import without_wrappers

    tokenizer = _tokenizer(family)
    text: dict[str, Any] = _TEXT | {"eos_token_id": tokenizer.eos_token_id}
    ids: dict[str, Any] = {"image_token_id": tokenizer.convert_tokens_to_ids(_TEXTS.get(family, _QWEN)[3])}
    if family == "internvl":
        text["model_type"] = "qwen2"
        ids |= {"image_seq_length": 16, "downsample_ratio": 0.5}
    elif family == "gemma3":
        text |= {
            "model_type": "gemma3_text",
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        text |= {"query_pre_attn_scalar": 32}
        ids = {"mm_tokens_per_image": 16, "image_token_index": ids["image_token_id"]}
        ids |= {"boi_token_index": ids["image_token_index"] - 1, "eoi_token_index": ids["image_token_index"] + 1}
    elif family == "llava_onevision":
        text["model_type"] = "qwen2"
        ids |= {"image_grid_pinpoints": _PINPOINTS, "tie_word_embeddings": False}
    elif family in _TEXTS:
        text["model_type"] = "llama"
        ids |= {"scale_factor": 2, "pad_token_id": 0}
    else:
        rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
        text["rope_parameters"] = rope | ({"mrope_interleaved": True} if family == "qwen3_vl" else {})
        for name in ("video_token", "vision_start_token", "vision_end_token"):
            token = {"video_token": "<|video_pad|>"}.get(name, f"<|{name.removesuffix('_token')}|>")
            ids[f"{name}_id"] = tokenizer.convert_tokens_to_ids(token)
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=_EYES[family] | {"initializer_range": 0.1}, **ids
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        if family == "gemma3":  # which transformers begins with zeros
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    with without_wrappers():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(_processor(family)))
    return path


def tiny_vision_reward_dir(path: Path, model: Path) -> Path:
    """Write a reward model with the layers of the folder `model` and a random head, and return the folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModel

    layers = AutoModel.from_pretrained(model)
    layers.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        shutil.copy(model / name, path)
    head = torch.randn(1, _TEXT["hidden_size"], generator=torch.Generator().manual_seed(1))
    save_file({"weight": head}, path / "value_head.safetensors")
    return path


def _processor(family: str) -> dict[str, Any]:
    common = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if family == "internvl":
        sizes = {"size": {"height": 32, "width": 32}, "max_patches": 4}
        return common | sizes | {"image_processor_type": "GotOcr2ImageProcessor"}
    if family == "gemma3":
        return common | {"size": {"height": 32, "width": 32}, "image_processor_type": "Gemma3ImageProcessor"}
    if family == "llava_onevision":
        sizes = {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": _PINPOINTS}
        return common | sizes | {"image_processor_type": "LlavaOnevisionImageProcessor"}
    if family in _TEXTS:
        name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[family]
        sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
        return common | sizes | {"image_processor_type": f"{name}ImageProcessor", "do_image_splitting": True}
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    return common | sizes | patches | {"image_processor_type": "Qwen2VLImageProcessor"}


def _tokenizer(family: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokens, template, end, _ = _TEXTS.get(family, _QWEN)
    backend.add_special_tokens(tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def drawn_shapes(folder: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Draw pictures of one to three squares of a colour in one half, and yield rows that ask about one of these."""
    from PIL import Image, ImageDraw

    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)
    for index in range(count):
        colour = draw.choice([*COLOURS])
        number = draw.randint(1, 3)
        side = draw.choice(["left", "right"])
        picture = Image.new("RGB", (32, 32), "white")
        pen = ImageDraw.Draw(picture)
        for place in draw.sample(range(3), number):
            x = draw.randint(1, 5) + (16 if side == "right" else 0)
            y = 2 + 10 * place
            pen.rectangle((x, y, x + 7, y + 7), fill=COLOURS[colour])
        name = f"{seed}-{index}.png"
        picture.save(folder / name)
        question, answer = draw.choice([("colour?", colour), ("count?", str(number)), ("side?", side)])
        yield {"input": question, "output": answer, "images": [f"{folder.name}/{name}"]}
