"""From prompts to requests: renders turns, feeds the loop, and asks follow-up turns with the model's own answers.

Also the length check before a run and the fingerprint of what was asked. This module knows a tokenizer only as
something that renders messages to token ids, and does not know models, batches or time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dispark.tasks.rows import check_choice, check_unique
from dispark.types import Prompt, Request, RequestRecord

Message = dict[str, str]
Item = TypeVar("Item", Prompt, Request)
TURN_OVERHEAD = 64  # tokens that a chat template may put round a later turn


class Renderer(Protocol):
    """What this module needs of a tokenizer."""

    def render(self, messages: list[Message]) -> list[int]:
        """Token ids of the conversation so far, with the header of the answer at the end."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""


@dataclass
class _Conversation:
    prompt: Prompt
    messages: list[Message]
    turn: int = 0


def request_seed(seed: int, request_id: str) -> int:
    """A 63-bit seed that depends on the run's seed and the request only; the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def first_messages(prompt: Prompt) -> list[Message]:
    """The messages of a prompt's first turn; a system prompt is the tokenizer's to add."""
    return [{"role": "user", "content": prompt.turns[0]}]


def context_need(prompt: Prompt, tokenizer: Renderer, max_new_tokens: int) -> int:
    """Tokens of context that a conversation can need: all its turns and an answer of full length to each."""
    later = sum(len(tokenizer.encode(turn)) + TURN_OVERHEAD for turn in prompt.turns[1:])
    return len(tokenizer.render(first_messages(prompt))) + later + len(prompt.turns) * max_new_tokens


def render_fingerprint(rendered: Iterable[tuple[Sequence[int], Sequence[str]]]) -> str:
    """Hex sha256 of what a run asks.

    Args:
        rendered: for each conversation, in the suite's order, the token ids of its first turn and the plain text of
            the later ones, which can't be rendered before the model has answered. Each part is hashed with its
            length, so that no two different lists spell the same bytes.
    """
    digest = hashlib.sha256()

    def add_number(value: int) -> None:
        digest.update(value.to_bytes(8, "little"))

    for token_ids, later_turns in rendered:
        add_number(len(token_ids))
        for token_id in token_ids:
            add_number(token_id)
        add_number(len(later_turns))
        for turn in later_turns:
            data = turn.encode("utf-8")
            add_number(len(data))
            digest.update(data)
    return digest.hexdigest()


def check_lengths(
    items: Sequence[Item],
    tokenizer: Renderer,
    max_context: int,
    on_overlong: str = "error",
) -> tuple[list[Item], list[str]]:
    """Checks that every prompt leaves room for at least one new token.

    Args:
        items: prompts, of which the first turn is rendered, or requests.
        tokenizer: renders prompts.
        max_context: tokens that the target can hold, prompt and answer together.
        on_overlong: "error", or "skip" to leave such prompts out.

    Returns:
        The items kept, and the ids of those skipped.

    Raises:
        ValueError: no items, an unknown `on_overlong`, an empty rendering, a prompt that is too long (with "error"),
            or no prompt left (with "skip").
    """
    check_choice("on_overlong", on_overlong, ("error", "skip"))
    if not items:
        raise ValueError("task has no prompts: must have at least one")
    kept: list[Item] = []
    skipped: list[str] = []
    for item in items:
        if isinstance(item, Prompt):
            name, token_ids = item.prompt_id, _render_first(item, tokenizer)
        else:
            name, token_ids = item.request_id, list(item.prompt_ids)
            if not token_ids:
                raise ValueError(f"request {name}: no tokens: must have at least one")
        if len(token_ids) < max_context:
            kept.append(item)
        elif on_overlong == "skip":
            skipped.append(name)
        else:
            raise ValueError(
                f"prompt {name}: {len(token_ids)} tokens leave no room for an answer in a context of {max_context}; "
                f"allowed: at most {max_context - 1} tokens, or on_overlong=skip"
            )
    if not kept:
        raise ValueError(f"all {len(items)} prompts are too long: allowed are at most {max_context - 1} tokens")
    return kept, skipped


class ConversationSource:
    """Feeds the loop with first turns in order, and with follow-up turns as soon as they can be asked.

    A follow-up turn is rendered with the answer that the model gave (`RequestRecord.text`), and goes before new
    conversations. Where it no longer fits `max_context`, or renders to nothing, the conversation ends there and
    `skipped_turns` says so: a long answer must not end a run.

    Args:
        prompts: the conversations.
        tokenizer: renders messages to token ids.
        max_new_tokens: length cap of every answer, in tokens.
        seed: the run's seed, from which each request's own seed is derived.
        stop_strings: texts that end an answer.
        order: prompt ids in the order to be served; None serves in the given order. Every prompt once.
        max_context: tokens that the target can hold; None leaves follow-up turns unchecked.

    Raises:
        ValueError: no prompts, an id met twice, an `order` that is not a permutation, a cap below 1, or a first turn
            that renders to nothing.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Renderer,
        max_new_tokens: int,
        seed: int,
        stop_strings: Sequence[str] = (),
        order: Sequence[str] | None = None,
        max_context: int | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("task has no prompts: must have at least one")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: must be a whole number >= 1")
        check_unique(prompts, "task")
        self._by_id = {prompt.prompt_id: prompt for prompt in prompts}
        if order is not None and sorted(order) != sorted(self._by_id):
            raise ValueError(f"order of {len(order)} prompt ids: must name each of the {len(prompts)} prompts once")
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._stop_strings = tuple(stop_strings)
        self._max_context = max_context
        self._first_ids = {prompt_id: _render_first(prompt, tokenizer) for prompt_id, prompt in self._by_id.items()}
        self._fresh = deque(self._by_id if order is None else order)
        self._follow_ups: deque[Request] = deque()
        self._running: dict[str, _Conversation] = {}
        self.skipped_turns: dict[str, str] = {}

    @property
    def rendered(self) -> list[tuple[list[int], tuple[str, ...]]]:
        """What `render_fingerprint` takes, in the order of the prompts, whatever the order of serving."""
        return [(self._first_ids[prompt_id], prompt.turns[1:]) for prompt_id, prompt in self._by_id.items()]

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Never."""
        return False

    @property
    def num_waiting(self) -> int:
        """None: the prompts are a list that is worked off."""
        return 0

    def next(self) -> Request | None:
        """The next request that is ready, or None."""
        if self._follow_ups:
            return self._follow_ups.popleft()
        if not self._fresh:
            return None
        prompt = self._by_id[self._fresh.popleft()]
        conversation = _Conversation(prompt, first_messages(prompt))
        self._running[prompt.prompt_id] = conversation
        return self._request(conversation, self._first_ids[prompt.prompt_id])

    def finish(self, record: RequestRecord) -> None:
        """Takes a finished request; queues the next turn of its conversation, if there is one that fits."""
        request = record.request
        conversation = self._running.get(request.prompt_id)
        assert conversation is not None, f"{request.request_id} is not running"
        assert conversation.turn == request.turn, f"{request.request_id} is not running"
        prompt = conversation.prompt
        conversation.turn += 1
        if conversation.turn == len(prompt.turns):
            del self._running[request.prompt_id]
            return
        conversation.messages += [
            {"role": "assistant", "content": record.text},
            {"role": "user", "content": prompt.turns[conversation.turn]},
        ]
        token_ids = self._tokenizer.render(conversation.messages)
        reason = self._refuse(len(token_ids))
        if reason is None:
            self._follow_ups.append(self._request(conversation, token_ids))
            return
        for turn in range(conversation.turn, len(prompt.turns)):
            self.skipped_turns[f"{prompt.prompt_id}#{turn}"] = reason
        del self._running[request.prompt_id]

    def _refuse(self, num_tokens: int) -> str | None:
        if num_tokens == 0:
            return "turn renders to no tokens"
        if self._max_context is not None and num_tokens >= self._max_context:
            return f"{num_tokens} tokens leave no room for an answer in a context of {self._max_context}"
        return None

    def _request(self, conversation: _Conversation, token_ids: Sequence[int]) -> Request:
        prompt, turn = conversation.prompt, conversation.turn
        request_id = f"{prompt.prompt_id}#{turn}"
        return Request(
            request_id=request_id,
            prompt_id=prompt.prompt_id,
            turn=turn,
            task=prompt.task,
            category=prompt.category,
            prompt_ids=tuple(token_ids),
            max_new_tokens=self._max_new_tokens,
            seed=request_seed(self._seed, request_id),
            stop_strings=self._stop_strings,
        )


def _render_first(prompt: Prompt, tokenizer: Renderer) -> list[int]:
    token_ids = tokenizer.render(first_messages(prompt))
    if not token_ids:
        raise ValueError(f"prompt {prompt.prompt_id}: renders to no tokens: must render to at least one")
    return token_ids
