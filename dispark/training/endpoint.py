"""Answers from a server that speaks the OpenAI chat protocol and runs the target, in place of the packed loop.

What comes back is text, so its tokens are those of the target's own tokenizer, with the end-of-turn token behind an
answer that the server says it finished. An answer that can't be had after some tries is left out, and asked for again
when the command is run again.

It knows nothing of rows on disk and filters.
"""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from dispark.tasks.conversation import request_seed
from dispark.training.seeds import Seed
from dispark.types import Sampling

log = logging.getLogger(__name__)

_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
_MOST_FAILURES = 8  # answers that failed one after the other, after which the server is taken for dead
_FIRST_PAUSE_S = 0.5


class NoEndpoint:
    """The target answers on the loop."""


class EndpointError(Exception):
    """An answer that could not be had."""


@dataclass(frozen=True)
class Answer:
    """Args: text; finish_reason: stop or length, as the server says."""

    text: str
    finish_reason: str


@dataclass(frozen=True)
class ChatFormat:
    """What a target's prompts hold beside the user's turn; the server has to render the same.

    Args:
        system_prompt: None leaves it to the template.
        template_kwargs: variables of the template, which servers of open models read.
    """

    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Mapping[str, Any]) -> ChatFormat:
        """Of a target's config.

        Raises:
            ValueError: the format can't be asked of a server.
        """
        if target.get("chat_template") is not None:
            raise ValueError(
                "target.chat_template: a server renders with the model's own; must be null with an endpoint"
            )
        if target.get("stop_strings"):
            raise ValueError("target.stop_strings: servers cut them out of answers; must be empty with an endpoint")
        return cls(target.get("system_prompt"), target.get("template_kwargs") or {})


class OpenAIEndpoint:
    """A chat server.

    Args:
        url: up to and with /v1.
        model: name of the target on the server.
        key_variable: environment variable with the key; unset sends none.
        concurrency: requests at a time.
        timeout_s: seconds to wait for an answer.
        retries: further tries after an error that may pass.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key_variable: str = "OPENAI_API_KEY",
        concurrency: int = 32,
        timeout_s: float = 300.0,
        retries: int = 4,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint.url={url}: must start with http:// or https://")
        if concurrency < 1:
            raise ValueError(f"endpoint.concurrency={concurrency}: must be a whole number >= 1")
        if not timeout_s > 0:
            raise ValueError(f"endpoint.timeout_s={timeout_s}: must be above 0")
        if retries < 0:
            raise ValueError(f"endpoint.retries={retries}: must be a whole number >= 0")
        self.url, self.model, self.key_variable = url.rstrip("/"), model, key_variable
        self.concurrency, self.timeout_s, self.retries = concurrency, timeout_s, retries
        self.failed: Counter[str] = Counter()

    def answers(
        self,
        seeds: Iterable[Seed],
        sampling: Sampling,
        max_new_tokens: int,
        seed: int,
        chat: ChatFormat | None = None,
    ) -> Iterator[tuple[Seed, Answer]]:
        """Yields answers as they come, in no fixed order; those that can't be had are counted in `failed`.

        Raises:
            ValueError: a seed without a text, a request that the server refuses, or one that no longer answers.
        """
        waiting, in_a_row, chat = iter(seeds), 0, chat or ChatFormat()
        open_requests: dict[Future[Answer], Seed] = {}
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                while True:
                    while len(open_requests) < self.concurrency and (item := next(waiting, None)) is not None:
                        body = self._body(item, sampling, max_new_tokens, request_seed(seed, item.row_id), chat)
                        open_requests[pool.submit(self._ask, body)] = item
                    if not open_requests:
                        return
                    for done in wait(open_requests, return_when=FIRST_COMPLETED).done:
                        item = open_requests.pop(done)
                        try:
                            answer = done.result()
                        except EndpointError as error:
                            in_a_row += 1
                            self.failed["endpoint failed"] += 1
                            log.warning("endpoint: no answer to %s (%s)", item.row_id, error)
                            if in_a_row >= _MOST_FAILURES:
                                raise ValueError(
                                    f"endpoint.url={self.url}: {in_a_row} requests failed one after the other, the "
                                    f"last with: {error}; what was answered is kept, the same command goes on"
                                ) from error
                            continue
                        in_a_row = 0
                        yield item, answer
            finally:
                for request in open_requests:
                    request.cancel()

    def _body(self, item: Seed, sampling: Sampling, max_new_tokens: int, seed: int, chat: ChatFormat) -> bytes:
        if item.text is None:
            raise ValueError(
                "prompts: turns that the target writes itself need the loop; use other prompts with an endpoint"
            )
        head = [] if chat.system_prompt is None else [{"role": "system", "content": chat.system_prompt}]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*head, {"role": "user", "content": item.text}],
            "temperature": sampling.temperature,
            "max_tokens": max_new_tokens,
            "seed": seed % 2**31,
        }
        if sampling.top_p is not None:
            fields["top_p"] = sampling.top_p
        if sampling.top_k is not None:
            fields["top_k"] = sampling.top_k  # not in the protocol, but servers of open models read it
        if chat.template_kwargs:
            fields["chat_template_kwargs"] = dict(chat.template_kwargs)
        return json.dumps(fields).encode()

    def _ask(self, body: bytes) -> Answer:
        """One answer, with further tries; raises EndpointError, or ValueError where trying again can't help."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}/chat/completions", body, headers)
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return _answer(json.load(reply))
            except urllib.error.HTTPError as error:
                words = " ".join(error.read(300).decode("utf-8", "replace").split())
                if error.code not in _PASSING:
                    raise ValueError(f"endpoint.url={self.url}: refused with {error.code}: {words}") from error
                reason = f"{error.code}: {words}"
            except (
                OSError,
                ValueError,
                KeyError,
                IndexError,
                TypeError,
            ) as error:  # no answer in it
                reason = f"{type(error).__name__}: {error}"
        raise EndpointError(reason)


def _answer(reply: dict[str, Any]) -> Answer:
    choice = reply["choices"][0]
    text = choice["message"]["content"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("an empty answer")
    return Answer(text, "stop" if choice.get("finish_reason") == "stop" else "length")
