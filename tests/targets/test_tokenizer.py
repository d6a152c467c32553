"""Rendering, encoding and decoding, with and without a stock tokenizer behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from dispark.targets.conversion import convert_gguf
from dispark.targets.tokenizer import ByteTokenizer, ChatTokenizer, NoTokenizer, Tokenizer, fingerprint

USER = {"role": "user", "content": "he"}
TALK = [USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.fixture(scope="module")
def stock(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    convert_gguf(gguf, folder, torch.float32)
    return AutoTokenizer.from_pretrained(folder)


def test_interface(stock: Any) -> None:
    for tokenizer in (ChatTokenizer(stock), ByteTokenizer(), NoTokenizer(8)):
        assert isinstance(tokenizer, Tokenizer)


def test_chat_renders_the_template_with_a_generation_prompt(stock: Any) -> None:
    tokenizer = ChatTokenizer(stock)
    ids = tokenizer.render(TALK)
    assert tokenizer.decode_raw(ids) == (
        "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.decode(ids) == "user\nhe\nassistant\na\nuser\nb\nassistant\n"
    assert tokenizer.render(TALK) == ids
    assert tokenizer.eos_id == 2


def test_template_variables_reach_the_template(stock: Any) -> None:
    plain, off = ChatTokenizer(stock), ChatTokenizer(stock, template_kwargs={"enable_thinking": False})
    assert off.decode_raw(off.render([USER])) == plain.decode_raw(plain.render([USER])) + "<think></think>"


def test_system_prompt_goes_first_unless_the_conversation_has_one(stock: Any) -> None:
    tokenizer = ChatTokenizer(stock, system_prompt="sys")
    assert tokenizer.decode(tokenizer.render([USER])).startswith("system\nsys\nuser\nhe")
    own = [{"role": "system", "content": "own"}, USER]
    assert tokenizer.decode(tokenizer.render(own)).startswith("system\nown\nuser\nhe")
    empty = ChatTokenizer(stock, system_prompt="")
    assert empty.decode(empty.render([USER])).startswith("system\n\nuser")


def test_rendering_leaves_the_messages_alone(stock: Any) -> None:
    messages = [dict(USER)]
    ChatTokenizer(stock, system_prompt="sys").render(messages)
    ByteTokenizer("sys").render(messages)
    assert messages == [USER]


def test_raw_text_has_no_template_and_a_bos_only_where_the_tokenizer_adds_one(stock: Any) -> None:
    raw = ChatTokenizer(stock, chat_template="none")
    assert raw.decode_raw(raw.render([USER])) == "he"
    assert raw.decode_raw(raw.render(TALK)) == "he\n\na\n\nb"
    assert raw.render([{"role": "user", "content": ""}]) == []

    class AddsBos:
        chat_template = None
        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": [1] * add_special_tokens + [7] * len(text)}

    assert ChatTokenizer(AddsBos(), chat_template="none").render([USER]) == [1, 7, 7]


def test_own_jinja_template(stock: Any) -> None:
    template = "{{ bos_token }}Q: {{ messages[-1]['content'] }}{% if add_generation_prompt %} A:{% endif %}"
    tokenizer = ChatTokenizer(stock, chat_template=template)
    assert tokenizer.decode_raw(tokenizer.render(TALK)) == "<|im_start|>Q: b A:"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template failed: roles must alternate"),
        ("{% for %}", "the chat template failed"),
        ("{{ messages[0]['content'] + 1 }}", "the chat template failed"),
        ("{{ absent.x.y }}", "the chat template failed"),
    ],
)
def test_template_errors_are_one_line(stock: Any, template: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"target mine: {words}") as caught:
        ChatTokenizer(stock, chat_template=template, name="mine").render([USER])
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_template_is_refused(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "chat_template", None)
    with pytest.raises(ValueError, match=r"target.chat_template=null: the tokenizer of target mine brings no"):
        ChatTokenizer(stock, name="mine")
    assert ChatTokenizer(stock, chat_template="none").render([USER])


def test_reserved_template_variables_are_refused(stock: Any) -> None:
    with pytest.raises(ValueError, match=r"target.template_kwargs.tokenize"):
        ChatTokenizer(stock, template_kwargs={"tokenize": True})


@pytest.mark.parametrize("text", ["", "he  12\n\n3", "é 漢字 🙂", "\x00\ufffd", "<|im_end|>"])
def test_stock_round_trip(stock: Any, text: str) -> None:
    tokenizer = ChatTokenizer(stock)
    assert tokenizer.decode_raw(tokenizer.encode(text)) == text


def test_cut_utf8_and_ids_beyond_the_vocabulary_decode(stock: Any) -> None:
    tokenizer = ChatTokenizer(stock)
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert tokenizer.decode([tokenizer.vocab_size + 5, *tokenizer.encode("he")]) == "he"
    assert tokenizer.decode([]) == ""


def test_fingerprint_follows_the_vocabulary(stock: Any) -> None:
    assert ChatTokenizer(stock).vocab_fingerprint == ChatTokenizer(stock, chat_template="none").vocab_fingerprint
    assert ChatTokenizer(stock).vocab_fingerprint != ByteTokenizer().vocab_fingerprint
    assert fingerprint({"a": 1, "b": 0}) == fingerprint({"b": 0, "a": 1}) != fingerprint({"a": 0, "b": 1})
    assert ByteTokenizer("sys").vocab_fingerprint == ByteTokenizer().vocab_fingerprint


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"messages=\[\]"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role='robot': must be one of system, user, assistant"),
        ([USER, {"content": "x"}], r"messages\[1\].role=None"),
        ([{"role": "user"}], r"messages\[0\].content is NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is int"),
        ([{"role": "user", "content": "a\ud800"}], "unpaired surrogate at character"),
    ],
)
def test_malformed_conversations(stock: Any, messages: Any, words: str) -> None:
    for tokenizer in (ChatTokenizer(stock), ChatTokenizer(stock, chat_template="none"), ByteTokenizer()):
        with pytest.raises(ValueError, match=words):
            tokenizer.render(messages)


def test_byte_chat_format() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.render(TALK)
    assert tokenizer.decode_raw(ids) == "<bos><user>he<eos><assistant>a<eos><user>b<eos><assistant>"
    assert tokenizer.decode(ids) == "heab"
    assert max(ids) < tokenizer.vocab_size == 262
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)
    assert tokenizer.token_id("<eos>") == 257
    assert tokenizer.token_id("eos") is None
    system = ByteTokenizer("s")
    assert system.decode_raw(system.render([USER])) == "<bos><system>s<eos><user>he<eos><assistant>"


@given(st.text())
def test_byte_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(min_value=-3, max_value=600)))
def test_byte_decoding_never_fails(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer.decode(ids), str)
    assert isinstance(tokenizer.decode_raw(ids), str)


def test_byte_decoding_of_odd_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xC3, 257, 0x28]) == "\ufffd("
    assert tokenizer.decode_raw([104, 300, 257]) == "h<300><eos>"
    assert tokenizer.encode("<eos>") == list(b"<eos>")


def test_no_tokenizer_says_so() -> None:
    tokenizer = NoTokenizer(40, "mine")
    assert (tokenizer.vocab_size, tokenizer.vocab_fingerprint, tokenizer.eos_id) == (40, None, None)
    assert tokenizer.token_id("a") is None
    for call in (
        lambda: tokenizer.render([USER]),
        lambda: tokenizer.encode("a"),
        lambda: tokenizer.decode([1]),
        lambda: tokenizer.decode_raw([1]),
    ):
        with pytest.raises(ValueError, match="target mine has no tokenizer"):
            call()


def test_vicuna_format(stock: Any, repo: Path) -> None:
    template = OmegaConf.load(repo / "conf" / "target" / "vicuna_7b.yaml").chat_template
    tokenizer = ChatTokenizer(stock, chat_template=template)
    bos, eos, system = (
        "<|im_start|>",
        "<|im_end|>",
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    )
    expected = f"{bos}{system} USER: he ASSISTANT: a{eos}USER: b ASSISTANT:"
    assert tokenizer.decode_raw(tokenizer.render(TALK)) == expected
    own = [{"role": "system", "content": "Hm."}, USER]
    assert tokenizer.decode_raw(tokenizer.render(own)) == f"{bos}Hm. USER: he ASSISTANT:"


def test_gemma_base_format(stock: Any, repo: Path) -> None:
    template = OmegaConf.load(repo / "conf" / "target" / "gemma3_270m.yaml").chat_template
    tokenizer = ChatTokenizer(stock, chat_template=template)
    expected = "<|im_start|>User: he\n\nAssistant: a\n\nUser: b\n\nAssistant:"
    assert tokenizer.decode_raw(tokenizer.render(TALK)) == expected
