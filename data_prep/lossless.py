"""Whether a tokenizer of Hugging Face keeps every text, and which of its settings does not."""

import json
from collections.abc import Iterator
from typing import Any

from alma.errors import UserError

TRIALS = (
    "It's  1234 A1\u00e9 x\u0301: \u6f22\u5b57\n\U0001f600 <|x|>\u200b\n",
    "\ufb01\u2026 \uff11 \u2460 \u0623\u0647 \u0939\u093f \u0e44\u0e17\u0e22 \ud55c '\u2019",
    "\ue000 \U00013000\U0010fffd\n\n{x}  =\t[0];\n",
)
"""Texts that a tokenizer has to give back; NFC leaves them as they are, NFKC does not."""
SPACE = "\u2581"  # SentencePiece's mark for a space
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""The tokens of the 256 bytes of a model with byte_fallback."""
_SHOWN = 8  # characters of a lost text in a message


def is_byte_level(engine: Any) -> bool:
    """Whether a `tokenizers.Tokenizer` encodes bytes, as those of GPT-2 and Llama 3 do."""
    return has_bytes([*_steps(engine.normalizer), *_steps(engine.pre_tokenizer)])


def has_bytes(steps: list[dict[str, Any]]) -> bool:
    """Whether bytes are encoded by these steps of a normalizer and a pre-tokenizer."""
    return any(step["type"] == "ByteLevel" for step in steps)


def check(name: object, engine: Any) -> None:
    """Raise a UserError, which names a setting, if a `tokenizers.Tokenizer` loses text.

    `name`: its file. `engine` encodes special tokens as text, and has its decoder.
    """
    lost = _lost_bytes(engine)
    if not lost:
        lost = next(_lost_texts(engine), "")
    if lost:
        raise UserError(f"{name}: loses text: {lost}; use a tokenizer without this setting")
    _check_added_tokens(name, engine)


def _lost_bytes(engine: Any) -> str:
    """Why some bytes have no token, or texts have no fixed ids; "": neither."""
    from tokenizers import models, pre_tokenizers

    if getattr(engine.model, "dropout", None):
        return f"dropout {engine.model.dropout} gives a text other ids each time"
    tokens = engine.get_vocab(with_added_tokens=True).keys()
    kind = type(engine.model).__name__
    if not isinstance(engine.model, models.BPE | models.Unigram):
        return f"model {kind} has no tokens for unknown words"
    if is_byte_level(engine):
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - tokens
        setting = "vocab"
    else:
        if not json.loads(engine.model.__getstate__()).get("byte_fallback"):
            return f"model {kind} with byte_fallback false has no tokens for unknown characters"
        missing = set(BYTES) - tokens
        setting = "vocab, with byte_fallback,"
    if missing:
        return f"{setting} lacks {len(missing)} of the 256 bytes"
    return ""


def _lost_texts(engine: Any) -> Iterator[str]:
    """Yield, for each trial that is not given back, the setting and what becomes of the text."""
    for text in TRIALS:
        decoded = _back_and_forth(engine, text)
        if decoded != text:
            yield f"{_culprit(engine, text)} turns {_difference(text, decoded)}"


def _back_and_forth(engine: Any, text: str) -> str:
    ids = engine.encode(text, add_special_tokens=False).ids
    return engine.decode(ids, skip_special_tokens=False)


def _difference(text: str, decoded: str) -> str:
    """The first place in which two texts differ, for a message."""
    start = 0
    while text[start : start + 1] == decoded[start : start + 1]:
        start += 1
    start = max(start - 1, 0)
    return f"{text[start : start + _SHOWN]!r} into {decoded[start : start + _SHOWN]!r}"


def _culprit(engine: Any, text: str) -> str:
    """The setting of a tokenizer that loses a part of `text`."""
    normal = text
    for step in _steps(engine.normalizer):
        if step["type"] == "ByteLevel":
            break
        changed = _with(normalizer=step).normalizer.normalize_str(normal)
        if _without_marks(changed) != _without_marks(normal):
            return f"normalizer {step['type']}"
        normal = changed
    for step in _steps(engine.pre_tokenizer):
        if step["type"] == "Metaspace":
            continue
        if step["type"] == "ByteLevel":
            if step.get("add_prefix_space"):
                return "pre_tokenizer ByteLevel with add_prefix_space true"
            continue
        pieces = _with(pre_tokenizer=step).pre_tokenizer.pre_tokenize_str(normal)
        if "".join(piece for piece, _ in pieces) != normal:
            return f"pre_tokenizer {step['type']}"
    kinds = [step["type"] for step in _steps(engine.decoder)]
    return f"decoder {' '.join(kinds) or 'null'}"


def _without_marks(text: str) -> str:
    """A text without SentencePiece's marks of spaces, and without the one before it."""
    return text.replace(SPACE, " ").removeprefix(" ")


def _steps(component: Any) -> list[dict[str, Any]]:
    """The `flat_steps` of a normalizer, pre-tokenizer or decoder."""
    return flat_steps(component and json.loads(component.__getstate__()))


def flat_steps(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder in a tokenizer.json."""
    pending = [state] if state else []
    steps = []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            inner = []
            for key in ("normalizers", "pretokenizers", "decoders"):
                inner += step.get(key, [])
            pending = inner + pending
        else:
            steps.append(step)
    return steps


def _with(**components: Any) -> Any:
    """A tokenizer of no tokens with a normalizer or a pre-tokenizer."""
    from tokenizers import Tokenizer, models

    state = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps(state | components))


def _check_added_tokens(name: object, engine: Any) -> None:
    """Raise a UserError if text beside an added token is lost.

    Special tokens are encoded as text, so only the others matter.
    """
    byte_level = is_byte_level(engine)
    for token in engine.get_added_tokens_decoder().values():
        if token.special or (SPACE in token.content and not byte_level):
            continue
        text = f"a {token.content} b{token.content}c"
        decoded = _back_and_forth(engine, text)
        if decoded != text:
            problem = f"the added token {token.content!r} turns {text!r} into {decoded!r}"
            remedy = 'set "special": true for it, so that a text that has it is encoded as text'
            raise UserError(f"{name}: loses text: {problem}; {remedy}")
