"""Documents with chat turns: their text by the chat template of a model's tokenizer."""

from dataclasses import dataclass
from typing import Any

_ROLES = {"human": "user", "gpt": "assistant"}
"""transformers' roles for those of ShareGPT that have other names."""


class BadChat(Exception):
    """A field without turns, or turns that the template refuses; the argument says why."""


@dataclass(frozen=True)
class Chat:
    """How turns become text: as `apply_chat_template` of transformers writes them."""

    template: str
    """Jinja, as in tokenizer_config.json or chat_template.jinja."""
    tokens: dict[str, str]
    """The special tokens that a template may name, such as bos_token."""

    def text(self, value: Any) -> str:
        """The text of a field: a list of {role, content} or {from, value}.

        A template that asks for the date takes its own default, because a stream must not depend
        on the day. BadChat: no turns, or the template refuses them.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = _turns(value)
        without_date = jinja2.Undefined(name="strftime_now")
        try:
            rendered, _ = render_jinja_template(
                conversations=[turns],
                chat_template=self.template,
                strftime_now=without_date,
                **self.tokens,
            )
        except Exception as error:  # whatever the template raises
            raise BadChat(f"the chat template refuses the turns ({error})") from error
        return rendered[0]


def _turns(value: Any) -> list[dict[str, Any]]:
    """The turns with transformers' names. BadChat: others, or none."""
    turns = []
    for turn in value if isinstance(value, list) else []:
        if not isinstance(turn, dict):
            raise BadChat("a turn that is no object with role and content, or from and value")
        if "role" not in turn and {"from", "value"} <= turn.keys():
            rest = {key: turn[key] for key in turn if key not in ("from", "value")}
            turn = {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"], **rest}
        if not isinstance(turn.get("role"), str):
            raise BadChat("a turn without role and content, or from and value")
        turns.append(turn)
    if not turns:
        raise BadChat("no list of chat turns (--text-key names another field)")
    return turns
