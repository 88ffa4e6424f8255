"""The text of single tokens, from the tokenizer of a run's model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.config.paths import model_path
from rlhf_cli.report.runs import Run
from rlhf_data.hub_names import hub_name

_FILE = "tokenizer.json"


class Texts:
    """Texts of the tokens that were seen.

    Attributes:
        path: the tokenizer's file; empty if this machine has none, and tokens are then shown by their numbers.
        seen: by token id, its text. A part of a character has the replacement character in it.
    """

    def __init__(self, run: Run) -> None:
        self.seen: dict[int, str] = {}
        self.path = ""
        self._tokenizer: Any = None
        for folder in _folders(run):
            if (folder / _FILE).is_file():
                self._open(folder / _FILE)
                break

    def _open(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception:  # the library raises nothing else; the report then does without
            return
        self.path = str(path)

    def see(self, token_ids: Sequence[int]) -> list[int]:
        """Note the texts of tokens; return the tokens."""
        tokens = list(token_ids)
        if self._tokenizer is not None:
            for token in set(tokens) - self.seen.keys():
                self.seen[token] = self._text(token)
        return tokens

    def _text(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return f"⟨{token}⟩"
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        # SentencePiece's decoders drop the space at the beginning of a text.
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


def _folders(run: Run) -> list[Path]:
    """Return the folders that may hold the tokenizer: the saved model's, and that of the model that was trained."""
    named = next((value for _, name, value, _ in run.config if name == "pretrain"), None)
    folders = [run.folder / "model", run.folder / "best_model"]
    if isinstance(named, str) and named:
        path = model_path(named)
        folders += [Path(path)] if hub_name(path) is None else _cached(path)
    return folders


def _cached(name: str) -> list[Path]:
    """Return the folder of a model in this machine's cache of the hub, if it is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    found = hub_name(name)
    assert found is not None
    try:
        path = try_to_load_from_cache(found.repository, _FILE, revision=found.revision)
    except HFValidationError:
        path = None
    return [Path(path).parent] if isinstance(path, str) else []
