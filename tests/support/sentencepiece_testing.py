"""Tokenizers that write a space before each text, as SentencePiece does, and one of bytes that does not."""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
)
TEMPLATES = {
    # Llama 2 writes a space before an answer, Mistral nothing, Zephyr a line break.
    "llama2": INST + "{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
    "mistral": INST + "{{ m.content + eos_token }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
}
KINDS = ("first", "always", "prepend", "bytes")
SPECIAL = ["<unk>", "<s>", "</s>"]


def make_tokenizer(kind: str, template: str = "zephyr") -> Any:
    """Return a BPE tokenizer that writes a space before the whole text (`first`), also after each special token
    (`always`), by a normalizer as in Llama 2's tokenizer.json (`prepend`), or nowhere (`bytes`)."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    if kind == "bytes":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    texts = [f"{one} plus {two}? It is {one + two}. user assistant Yes ки" for one in range(9) for two in range(9)]
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁"] if kind == "bytes" else [*"[]/<|>.,?▁", *"AINSTWYeht"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    if kind != "bytes":  # characters that are no tokens become bytes, such as a line break
        model = json.loads(core.to_str())["model"]
        size = len(model["vocab"])
        vocab = model["vocab"] | {f"<0x{byte:02X}>": size + byte for byte in range(256)}
        merges = [tuple(pair) for pair in model["merges"]]
        core.model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False) if kind != "prepend" else None
        fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence(fuse)
    if kind == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer
