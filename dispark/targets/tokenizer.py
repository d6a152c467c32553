"""Text to token ids and back: a chat tokenizer over a `transformers` one, a byte tokenizer, and none at all.

All three share one interface, `Tokenizer`. Rendering is deterministic and adds nothing that the chosen template doesn't
contain. Text that spells a special token (say "<|im_end|>") becomes that token in ChatTokenizer, as everywhere in the
field; ByteTokenizer keeps it as bytes. This module does not know which ids end a generation for a given model (see
spec.py) and never cuts anything to a length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from dispark.targets.quiet import first_line

ROLES = ("system", "user", "assistant")

# Arguments of apply_chat_template that this module sets itself.
RESERVED_TEMPLATE_KWARGS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "return_dict",
    "return_tensors",
    "tokenize",
)


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the project may ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids the tokenizer knows; a model's embedding may be padded beyond it."""

    @property
    def vocab_fingerprint(self) -> str | None:
        """Same vocabulary, same string; None where the vocabulary is unknown (then only sizes can be compared)."""

    @property
    def eos_id(self) -> int | None: ...

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, ready for the assistant to continue."""

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, nothing added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no valid UTF-8 become U+FFFD."""

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Text with special tokens spelled out."""

    def token_id(self, token: str) -> int | None:
        """The id of one token by its spelling, or None."""


def fingerprint(vocab: Mapping[str, int]) -> str:
    """sha256 over the vocabulary's (token, id) pairs in sorted order."""
    return hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()


class ChatTokenizer:
    """A `transformers` tokenizer with a fixed chat format.

    Args:
        tokenizer: the stock tokenizer.
        chat_template: None takes the tokenizer's own template; "none" joins the contents as raw text, after a BOS where
            the tokenizer itself would put one; any other string is a jinja template.
        system_prompt: put in front of conversations that bring no system message; None leaves it to the template.
        template_kwargs: extra variables of the template, for example {"enable_thinking": False}.
        name: the target's name, for messages.

    Raises:
        ValueError: the tokenizer has no template and none was given, or a template variable is reserved.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self._system_prompt = system_prompt
        self._template_kwargs = dict(template_kwargs or {})
        self._name = name
        reserved = sorted(set(self._template_kwargs) & set(RESERVED_TEMPLATE_KWARGS))
        if reserved:
            raise ValueError(f"target.template_kwargs.{reserved[0]}: is set by the benchmark and can't be overridden")
        if chat_template is None and not tokenizer.chat_template:
            raise ValueError(
                f"target.chat_template=null: the tokenizer of target {name} brings no chat template; "
                "give 'none' (raw text) or a jinja string"
            )
        self._has_bos = tokenizer.bos_token_id is not None and self._ids("x", True)[:1] == [tokenizer.bos_token_id]

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def vocab_fingerprint(self) -> str:
        return fingerprint(self._tokenizer.get_vocab())

    @property
    def eos_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the conversation with the generation prompt; may be empty for empty raw text.

        Raises:
            ValueError: a message is malformed, the template refuses it, or the text is not valid Unicode.
        """
        conversation = _checked(messages, self._system_prompt)
        if self._template == "none":
            ids = self.encode("\n\n".join(message["content"] for message in conversation))
            return [self._tokenizer.bos_token_id, *ids] if self._has_bos else ids
        from jinja2 import TemplateError  # deferred with transformers, which needs it for the same purpose

        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self._template,
                **self._template_kwargs,
            )
        except (TemplateError, TypeError, AttributeError) as error:
            raise ValueError(f"target {self._name}: the chat template failed: {first_line(error)}") from error
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return self._ids(text, False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._text(ids, True)

    def decode_raw(self, ids: Sequence[int]) -> str:
        return self._text(ids, False)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)

    def _ids(self, text: str, has_special_tokens: bool) -> list[int]:
        _check_text(text)
        return list(self._tokenizer(text, add_special_tokens=has_special_tokens, verbose=False)["input_ids"])

    def _text(self, ids: Sequence[int], is_skipping: bool) -> str:
        return self._tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=is_skipping, clean_up_tokenization_spaces=False
        )


class ByteTokenizer:
    """The 256 bytes plus a few special tokens: needs no files, can spell any text.

    Chat format: <bos>, then for each message the token of its role, the content's UTF-8 bytes and <eos>; at the end the
    assistant's role token.
    """

    SPECIALS = ("<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>")

    def __init__(self, system_prompt: str | None = None) -> None:
        self._system_prompt = system_prompt
        self._special_ids = {token: 256 + index for index, token in enumerate(self.SPECIALS)}
        self.bos_id, self.eos_id, self.pad_id = (self._special_ids[token] for token in self.SPECIALS[:3])

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.SPECIALS)

    @cached_property
    def vocab_fingerprint(self) -> str:
        return fingerprint({f"<0x{byte:02X}>": byte for byte in range(256)} | self._special_ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the conversation with the generation prompt; raises ValueError for a malformed message."""
        conversation = _checked(messages, self._system_prompt)
        ids = [self.bos_id]
        for message in conversation:
            ids += [self._special_ids[f"<{message['role']}>"], *self.encode(message["content"]), self.eos_id]
        return [*ids, self._special_ids["<assistant>"]]

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")

    def decode_raw(self, ids: Sequence[int]) -> str:
        spelled = bytearray()
        for token in ids:
            if 0 <= token < 256:
                spelled.append(token)
            elif 256 <= token < self.vocab_size:
                spelled += self.SPECIALS[token - 256].encode()
            else:
                spelled += f"<{token}>".encode()  # a padded embedding row that no text maps to
        return spelled.decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        return self._special_ids.get(token)


class NoTokenizer:
    """Stands in where only the size of the vocabulary is known: enough for a draft model, which sees ids only."""

    def __init__(self, vocab_size: int, name: str = "") -> None:
        self.vocab_size = vocab_size
        self.vocab_fingerprint: str | None = None
        self.eos_id: int | None = None
        self._name = name

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise self._error()

    def encode(self, text: str) -> list[int]:
        raise self._error()

    def decode(self, ids: Sequence[int]) -> str:
        raise self._error()

    def decode_raw(self, ids: Sequence[int]) -> str:
        raise self._error()

    def token_id(self, token: str) -> int | None:
        return None

    def _error(self) -> ValueError:
        return ValueError(f"target {self._name} has no tokenizer: it can serve as a draft model only, not read text")


def _checked(messages: Sequence[Mapping[str, str]], system_prompt: str | None) -> list[dict[str, str]]:
    """A copy of a well-formed conversation, with the system prompt in front where it brings none.

    Raises:
        ValueError: names the first bad message.
    """
    if not messages:
        raise ValueError("messages=[]: a conversation needs at least one message")
    conversation = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"messages[{index}].role={role!r}: must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"messages[{index}].content is {type(content).__name__}: must be a string")
        conversation.append({"role": role, "content": content})
    if system_prompt is not None and conversation[0]["role"] != "system":
        conversation.insert(0, {"role": "system", "content": system_prompt})
    return conversation


def _check_text(text: str) -> None:
    """Raises ValueError for text that no UTF-8 tokenizer can read."""
    if not isinstance(text, str):
        raise ValueError(f"text is {type(text).__name__}: must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text has an unpaired surrogate at character {error.start}: must be valid Unicode") from error
