"""Answers from a chat server: what is sent, what is kept, which errors pass and which end the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

import dispark.config
from dispark.targets.tokenizer import ByteTokenizer
from dispark.training import endpoint as module
from dispark.training.data import run_data
from dispark.training.endpoint import OpenAIEndpoint
from dispark.training.rows import read_rows
from dispark.training.seeds import Seed
from dispark.types import Sampling


class Server:
    """A chat server whose next replies can be set; by default it answers with the prompt's length."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.errors: list[int] = []
        self.finish_reason = "stop"
        self.text: str | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path, **body})
                outer.keys.append(self.headers.get("Authorization"))
                if outer.errors:
                    self.reply(outer.errors.pop(0), {"error": "not\nnow"})
                    return
                text = outer.text if outer.text is not None else f"{len(body['messages'][0]['content'])} letters"
                choice = {"message": {"role": "assistant", "content": text}, "finish_reason": outer.finish_reason}
                self.reply(200, {"choices": [choice]})

            def reply(self, status: int, value: dict[str, Any]) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)
    found = Server()
    yield found
    found.close()


def seeds(num: int) -> list[Seed]:
    return [Seed(f"s/{i}", "chat", f"question number {i} " + "?" * i) for i in range(num)]


def asked(endpoint: OpenAIEndpoint, num: int = 5, **sampling: Any) -> dict[str, Any]:
    found = endpoint.answers(seeds(num), Sampling(**sampling), 20, 0)
    return {item.row_id: answer for item, answer in found}


def test_every_seed_is_asked_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    endpoint = OpenAIEndpoint(server.url + "/", "a-model", key_variable="MY_KEY", concurrency=3)
    found = asked(endpoint, temperature=0.6, top_p=0.95)
    assert {name: answer.text for name, answer in found.items()} == {f"s/{i}": f"{18 + i} letters" for i in range(5)}
    assert {answer.finish_reason for answer in found.values()} == {"stop"}
    first = server.requests[0]
    assert (first["path"], first["model"], first["max_tokens"]) == ("/v1/chat/completions", "a-model", 20)
    assert (first["temperature"], first["top_p"], "top_k" in first) == (0.6, 0.95, False)
    assert len({request["seed"] for request in server.requests}) == 5
    assert set(server.keys) == {"Bearer secret"}


def test_errors_that_pass_are_tried_again(server: Server) -> None:
    server.errors = [503, 429]
    assert len(asked(OpenAIEndpoint(server.url, "m", concurrency=1), 2)) == 2
    assert len(server.requests) == 4
    assert server.keys == [None] * 4


def test_an_answer_that_cannot_be_had_is_left_out(server: Server) -> None:
    server.errors = [500, 500]
    endpoint = OpenAIEndpoint(server.url, "m", concurrency=1, retries=1)
    assert set(asked(endpoint, 3)) == {"s/1", "s/2"}
    assert endpoint.failed == {"endpoint failed": 1}


def test_a_refused_request_ends_the_run(server: Server) -> None:
    server.errors = [401]
    with pytest.raises(ValueError, match=r'endpoint.url=.*: refused with 401: \{"error": "not\\nnow"\}'):
        asked(OpenAIEndpoint(server.url, "m"))


def test_a_dead_server_ends_the_run(server: Server) -> None:
    server.errors = [500] * 100
    with pytest.raises(ValueError, match=r"8 requests failed one after the other, the last with: 500"):
        asked(OpenAIEndpoint(server.url, "m", concurrency=2, retries=0), 20)


def test_an_empty_answer_is_none(server: Server) -> None:
    server.text = " "
    endpoint = OpenAIEndpoint(server.url, "m", retries=1)
    assert asked(endpoint, 1) == {}


def test_turns_that_the_target_writes_need_the_loop(server: Server) -> None:
    with pytest.raises(ValueError, match="need the loop"):
        list(OpenAIEndpoint(server.url, "m").answers([Seed("a", "chat", None, "steer")], Sampling(), 5, 0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "localhost"}, "endpoint.url=localhost: must start with http"),
        ({"concurrency": 0}, "endpoint.concurrency=0"),
        ({"timeout_s": 0.0}, "endpoint.timeout_s=0.0"),
        ({"retries": -1}, "endpoint.retries=-1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpenAIEndpoint(**{"url": "http://x/v1", "model": "m", **settings})


def test_the_server_renders_what_the_target_would(server: Server, tmp_path: Path) -> None:
    dispark.config.make_conf_importable()
    words = ["target=tiny", "target.device=cpu", "prompts=templates", f"out={tmp_path}/d", "max_new_tokens=12"]
    words += ["prompts.counts={code: 0, math: 2, chat: 0, qa: 0, translation: 0, summarization: 0}"]
    words += ["endpoint=openai", f"endpoint.url={server.url}", "endpoint.model=tiny"]

    def go(*more: str) -> dict[str, Any]:
        with initialize_config_module("dispark.conf", version_base="1.3"):
            return run_data(compose("data", overrides=[*words, *more]))

    for key, value in (("target.chat_template", "'{{ messages }}'"), ("target.stop_strings", "[x]")):
        with pytest.raises(ValueError, match=rf"{key}: .* with an endpoint"):
            go(f"++{key}={value}")
    assert not server.requests
    go("++target.system_prompt=be brief", "++target.template_kwargs.enable_thinking=false")
    for request in server.requests:
        assert request["messages"][0] == {"role": "system", "content": "be brief"}
        assert request["chat_template_kwargs"] == {"enable_thinking": False}
    tokenizer = ByteTokenizer("be brief")
    for row in read_rows(tmp_path / "d"):
        assert row.prompt_ids == tokenizer.render([{"role": "user", "content": row.prompt}])


def test_no_prompt_is_asked_once_time_is_over(server: Server, tmp_path: Path) -> None:
    dispark.config.make_conf_importable()
    words = ["target=tiny", "target.device=cpu", "prompts=templates", f"out={tmp_path}/d", "minutes=1e-9"]
    words += ["endpoint=openai", f"endpoint.url={server.url}", "endpoint.model=tiny"]
    with (
        initialize_config_module("dispark.conf", version_base="1.3"),
        pytest.raises(ValueError, match="no row was made"),
    ):
        run_data(compose("data", overrides=words))
    assert not server.requests


def test_a_data_set_from_a_server(server: Server, tmp_path: Path) -> None:
    """Rows have the target's own tokens, and a second call asks only for what failed."""
    dispark.config.make_conf_importable()
    words = ["target=tiny", "target.device=cpu", "prompts=templates", f"out={tmp_path}/d", "max_new_tokens=12"]
    words += ["prompts.counts={code: 0, math: 6, chat: 0, qa: 0, translation: 0, summarization: 0}"]
    words += ["endpoint=openai", f"endpoint.url={server.url}", "endpoint.model=tiny", "endpoint.concurrency=1"]

    def go() -> dict[str, Any]:
        with initialize_config_module("dispark.conf", version_base="1.3"):
            return run_data(compose("data", overrides=words))

    server.errors = [500] * 5
    server.finish_reason = "length"
    first = go()
    assert first["num_rows"] == 5
    assert first["refused"] == {"endpoint failed": 1}
    num = len(server.requests)
    server.finish_reason = "stop"
    assert go()["num_rows"] == 6
    assert len(server.requests) == num + 1
    tokenizer = ByteTokenizer()
    rows = list(read_rows(tmp_path / "d"))
    assert sorted(row.finish_reason for row in rows) == ["length"] * 5 + ["stop"]
    for row in rows:
        assert row.prompt_ids == tokenizer.render([{"role": "user", "content": row.prompt}])
        assert (row.output_ids[-1] == tokenizer.eos_id) == (row.finish_reason == "stop")
        assert tokenizer.decode(row.output_ids) == f"{len(row.prompt)} letters"
