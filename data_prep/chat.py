"""Documents with chat turns: their text by the chat template of a model's tokenizer."""

import json
from dataclasses import dataclass
from typing import Any

_ROLES = {"human": "user", "gpt": "assistant"}
"""transformers' roles for those of ShareGPT that have other names."""
_WITHOUT_DATE = "{% set strftime_now = date_of_today %}\n"
"""Hides the function that gives the current date; trim_blocks removes the line break."""


class BadChat(Exception):
    """A field without turns, or turns that the template refuses; the argument says why."""


@dataclass(frozen=True)
class Chat:
    """How turns become text: as `apply_chat_template` of transformers writes them."""

    template: str
    """The JSON text of the template: settings of a stream hold no line breaks."""
    tokens: dict[str, str]
    """The special tokens that a template may name, such as bos_token."""

    @classmethod
    def of(cls, template: str, tokens: dict[str, str]) -> "Chat":
        """A chat by a template in Jinja, as in tokenizer_config.json or chat_template.jinja."""
        return cls(json.dumps(template), tokens)

    def text(self, value: Any) -> str:
        """The text of a field: a list of {role, content} or {from, value}.

        A template that asks for the date takes its own default, because a stream must not depend
        on the day. BadChat: no turns, or the template refuses them.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = _turns(value)
        template = json.loads(self.template)
        if "strftime_now" in template:
            template = _WITHOUT_DATE + template
        settings: dict[str, Any] = {"chat_template": template, **self.tokens}
        try:
            texts = render_jinja_template([turns], **settings)[0]
        except Exception as error:  # whatever the template raises
            raise BadChat(f"the chat template refuses the turns ({error})") from error
        return texts[0]


def _turns(value: Any) -> list[dict[str, Any]]:
    """The turns with transformers' names. BadChat: others, or none."""
    if not isinstance(value, list) or not value:
        raise BadChat("no list of chat turns (--text-key names another field)")
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            raise BadChat("a turn that is no object with role and content, or from and value")
        if "role" not in turn and {"from", "value"} <= turn.keys():
            turn = dict(turn)
            role = turn.pop("from")
            turn["role"] = _ROLES.get(str(role), role)
            turn["content"] = turn.pop("value")
        if not isinstance(turn.get("role"), str):
            raise BadChat("a turn without role and content, or from and value")
        # As apply_chat_template does: Parquet and Arrow have a null for each absent key.
        turns.append({key: part for key, part in turn.items() if part is not None})
    return turns
