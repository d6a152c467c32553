"""Makes training rows: turns are written or taken, filtered, and answered by the target on the packed loop.

A request source for the decoding loop. A seed without a text first becomes a request for a user's turn, whose answer,
if the filter lets it through, comes back as a request of its own. Finished answers go to the row writer at once.

It knows tokens and texts; what decodes them is the loop's business.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from dispark.tasks.conversation import Message, Renderer, request_seed
from dispark.training.filters import PromptFilter
from dispark.training.rows import RowWriter, TrainingRow
from dispark.training.seeds import Seed
from dispark.types import Request, RequestRecord

_ASK = "/ask"


def user_header(tokenizer: Renderer, system: str | None) -> list[int]:
    """Ids of a conversation up to where the user's turn begins: what two different turns have in common.

    Raises:
        ValueError: they have nothing in common, so the chat format gives nothing to continue.
    """
    head: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    first, second = (tokenizer.render([*head, {"role": "user", "content": text}]) for text in ("9", "Zebra"))
    common = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
    if not common:
        raise ValueError("prompts: the target's chat format has no user header that it could continue")
    return common


class SynthesisSource:
    """Feeds the loop with what is still to be made.

    Args:
        seeds: those of this part, rows that are done left out.
        tokenizer: of the target.
        prompt_filter: judges every turn.
        writer: takes the rows.
        max_new_tokens: cap of an answer.
        max_prompt_tokens: rendered prompts longer than this are left out.
        max_turn_tokens: cap of a turn that the target writes.
        seed: of the run.
        stop_strings: texts that end an answer.
        is_over: once true, no new seed is taken; what was begun is finished.
    """

    def __init__(
        self,
        seeds: Iterable[Seed],
        tokenizer: Renderer,
        prompt_filter: PromptFilter,
        writer: RowWriter,
        *,
        max_new_tokens: int,
        max_prompt_tokens: int,
        max_turn_tokens: int,
        seed: int,
        stop_strings: Sequence[str] = (),
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_over = is_over
        self._seeds = deque(seeds)
        self._tokenizer, self._filter, self._writer = tokenizer, prompt_filter, writer
        self._max_new_tokens, self._max_prompt_tokens = max_new_tokens, max_prompt_tokens
        self._max_turn_tokens, self._seed, self._stop_strings = max_turn_tokens, seed, tuple(stop_strings)
        self._ready: deque[Request] = deque()
        self._open: dict[str, tuple[Seed, str]] = {}
        self._headers: dict[str | None, list[int]] = {}
        self.left_out: Counter[str] = Counter()
        self.num_tokens = 0

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Never."""
        return False

    @property
    def num_waiting(self) -> int:
        """None: the seeds are a list that is worked off."""
        return 0

    @property
    def num_left(self) -> int:
        """Seeds that were not begun, and turns without an answer."""
        return len(self._seeds) + len(self._ready)

    def next(self) -> Request | None:
        """Answers that are ready first, then new seeds."""
        if self._ready:
            return self._ready.popleft()
        while self._seeds and not self._is_over():
            seed = self._seeds.popleft()
            if seed.text is None:
                if seed.steer not in self._headers:
                    self._headers[seed.steer] = user_header(self._tokenizer, seed.steer)
                self._open[seed.row_id] = (seed, "")
                return self._request(f"{seed.row_id}{_ASK}", self._headers[seed.steer], self._max_turn_tokens, ())
            if self._filter.accepts(seed.text) and (request := self._answer(seed, seed.text)) is not None:
                return request
        return None

    def finish(self, record: RequestRecord) -> None:
        """A turn becomes a request for its answer; an answer becomes a row."""
        self.num_tokens += len(record.output_ids)
        name = record.request.request_id
        seed, text = self._open.pop(name.removesuffix(_ASK))
        if name.endswith(_ASK):
            text = record.text.strip()
            if record.finish_reason != "stop":
                self.left_out["turn without an end"] += 1
                return
            request = self._answer(seed, text) if self._filter.accepts(text, True, record.output_ids) else None
            if request is not None:
                self._ready.append(request)
            return
        row = TrainingRow(
            row_id=seed.row_id,
            kind=seed.kind,
            prompt=text,
            prompt_ids=list(record.request.prompt_ids),
            output_ids=list(record.output_ids),
            finish_reason=record.finish_reason,
        )
        self._writer.append(row)

    def _answer(self, seed: Seed, text: str) -> Request | None:
        ids = self._tokenizer.render([{"role": "user", "content": text}])
        if len(ids) > self._max_prompt_tokens:
            self.left_out["prompt too long"] += 1
            return None
        self._open[seed.row_id] = (seed, text)
        return self._request(seed.row_id, ids, self._max_new_tokens, self._stop_strings)

    def _request(self, name: str, ids: Sequence[int], max_new_tokens: int, stop_strings: tuple[str, ...]) -> Request:
        return Request(
            request_id=name,
            prompt_id=name,
            turn=0,
            task="data",
            category="data",
            prompt_ids=tuple(ids),
            max_new_tokens=max_new_tokens,
            seed=request_seed(self._seed, name),
            stop_strings=stop_strings,
        )
