"""The text of a prompt from the input of a row: by the chat template or by a template with a placeholder."""

from dataclasses import dataclass, field

from rlhf_data.chat.messages import row_messages, row_tools
from rlhf_data.chat.template import render_prompt
from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.rows.row import Row

_PLACEHOLDER = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTemplate:
    """Options that turn the input of a row into the text of a prompt.

    Attributes:
        tokenizer: the model's tokenizer, loaded.
        apply_chat_template: render with the tokenizer's chat template.
        input_template: text with one `{}` for the input; everything else in it is literal.
        tools_key: the key of a row's tools, which the chat template writes; None for no tools. See `row_tools`.

    Raises:
        ConfigError: both templates are given, one that the tokenizer cannot apply, or tools without the chat template.
    """

    tokenizer: Tokenizer = field(repr=False)
    apply_chat_template: bool = False
    input_template: str | None = None
    tools_key: str | None = None

    def __post_init__(self) -> None:
        message = hint = None
        if self.apply_chat_template and self.input_template is not None:
            message = "``input_template`` has no effect when the chat template is applied"
            hint = "give either ``apply_chat_template`` or ``input_template``"
        elif self.apply_chat_template and not getattr(self.tokenizer, "chat_template", None):
            message = "the tokenizer has no chat template"
            hint = "use an instruction-tuned model, or ``input_template='User: {}'`` without ``apply_chat_template``"
            hint += "; sft, rm, dpo, kto and kd also take ``set_chat_template.text``"
        elif self.tools_key is not None and not self.apply_chat_template:
            message = "``tools_key`` has no effect without ``apply_chat_template``"
            hint = "apply the chat template, which writes the tools"
        elif self.input_template is not None and self.input_template.count(_PLACEHOLDER) != 1:
            message = f"``input_template`` must contain `{{}}` exactly once, got {self.input_template!r}"
            hint = "`{}` is where the input goes, as in 'Question: {} Answer: '"
        if message:
            raise ConfigError(message, hint=hint)

    def render(self, row: Row, key: str) -> str:
        """Return the text of a row's prompt.

        With the chat template, the input is one user message (or already a list of messages); see `render_prompt`.
        Otherwise the input is inserted into `input_template`.

        Raises:
            DataError: a missing key, an input that is empty or of the wrong type, or messages the template refuses.
        """
        if self.apply_chat_template:
            options = {"origin": row.origin, "tools": row_tools(row, self.tools_key)}
            return render_prompt(row_messages(row, key), self.tokenizer, **options)
        return (self.input_template or _PLACEHOLDER).replace(_PLACEHOLDER, self.plain_text(row, key))

    def plain_text(self, row: Row, key: str) -> str:
        """Return a text of a row that no chat template renders. Raises DataError as `Row.filled`, and for messages."""
        if isinstance(row.cell(key), list):
            message = f"{row.origin}: `{key}` is a list of messages"
            raise DataError(message, hint="messages need ``apply_chat_template``")
        return row.filled(key)
