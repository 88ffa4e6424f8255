"""A tokenizer without dependencies, for tests and for the fake engine."""

import json
import re
from typing import Any

EOS_ID, BOS_ID = 0, 2  # control bytes, which do not occur in text


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte, `<eos>` (0) and `<bos>` (2), and the interface of a Hugging Face one.

    Its chat template writes `<bos>`, then `role: content<eos>` and a newline per message. The generation prompt is
    `assistant: `. Tools come first, as JSON, and tool calls follow the content, as in Qwen's template. It refuses a
    conversation without a user message.

    Args:
        add_bos: whether tokenizing with special tokens adds `<bos>` at the start.
        add_eos: whether it adds `<eos>` at the end.
        chat_template: None for a tokenizer without one.
    """

    vocab_size = 256
    bos_token, eos_token, pad_token = "<bos>", "<eos>", "<eos>"
    bos_token_id, eos_token_id, pad_token_id = BOS_ID, EOS_ID, EOS_ID

    def __init__(self, *, add_bos: bool = True, add_eos: bool = False, chat_template: str | None = "plain") -> None:
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.chat_template = chat_template

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Return {"input_ids": ids}. For a list of texts, `ids` has a list per text."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
        return {"input_ids": [self.encode(one, add_special_tokens=add_special_tokens) for one in text]}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, in which `<bos>` and `<eos>` are one token each."""
        ids: list[int] = [BOS_ID] if add_special_tokens and self.add_bos else []
        for part in re.split("(<bos>|<eos>)", text):
            ids += {"<bos>": [BOS_ID], "<eos>": [EOS_ID]}.get(part, part.encode())
        return [*ids, EOS_ID] if add_special_tokens and self.add_eos else ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        special = {} if skip_special_tokens else {BOS_ID: b"<bos>", EOS_ID: b"<eos>"}
        ids = [int(token) for token in token_ids if not skip_special_tokens or token not in (BOS_ID, EOS_ID)]
        return b"".join(special.get(token, bytes([token])) for token in ids).decode(errors="replace")

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        return_dict: bool = True,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
    ) -> Any:
        """Return the rendered conversation as text or, with `tokenize`, as {"input_ids": ids} or ids."""
        if not any(message["role"] == "user" for message in conversation):
            raise ValueError("no user message")
        text = f"<bos>tools: {json.dumps(tools)}<eos>\n" if tools else "<bos>"
        for message in conversation:
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or []]
            called = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
            text += f"{message['role']}: {message['content']}{called}<eos>\n"
        text += "assistant: " if add_generation_prompt else ""
        text = text.removesuffix("<eos>\n") if continue_final_message else text
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids} if return_dict else ids
