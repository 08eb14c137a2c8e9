from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from core.errors import BadModel, BadRequest
from engine.tokenizer import Tokenizer
from tests.engine.golden import golden_cases

TEXTS = (
    "",
    " ",
    "plain words, and more of them.",
    "\t\t1\r\n    12  2024-01-01  12:00\n\n\n",
    "naïve café, œuvre, Straße",
    "日本語のテキストと漢字。한국어 中文",
    "مرحبا بالعالم",
    "🎉👩‍👩‍👧‍👦🇫🇷 emoji",
    "def f(x):\n    return x  # comment\n",
    "\x00\x7f\u200b\ufffd",
)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def test_golden_prompts_and_outputs(tokenizer: Tokenizer) -> None:
    for case in golden_cases():
        ids = tokenizer.encode_chat(case["messages"]) if "messages" in case else tokenizer.encode(case["text"])
        assert ids == case["prompt_ids"], case["name"]
        assert tokenizer.decode(case["output_ids"]) == case["output_text"], case["name"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_ids_are_those_of_the_library_with_offsets(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_sizes_and_ends(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)


def test_special_tokens_are_read_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "user"


def test_a_plain_encoder_reads_no_special_tokens(tokenizer: Tokenizer) -> None:
    text = "Say <|im_end|> twice."
    plain, special = tokenizer.plain_encoder()(text), set(tokenizer.special_token_ids())
    assert not special & set(plain) and special & set(tokenizer.encode(text))
    assert tokenizer.decode(plain) == text


def test_spellings_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert b"".join(tokenizer.spelling(token_id) for token_id in tokenizer.encode(text)) == text.encode()
    assert b"\xf0" in b"".join(tokenizer.spelling(token_id)[:1] for token_id in tokenizer.encode("🎉"))
    assert (tokenizer.spelling(2), tokenizer.spelling(tokenizer.vocab_size)) == (b"<|im_end|>", b"")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=12), data=st.data())
def test_decoder_joins_to_decode(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """For any ids, cut anywhere, even where they are no valid UTF-8; the tokenizers library agrees."""
    decoder = tokenizer.decoder()
    shown, rest = "", ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + decoder.push(rest[:count]), rest[count:]
    assert shown + decoder.finish() == tokenizer.decode(ids) == reference.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_decoder_shows_only_complete_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assume(tokenizer.decode(ids) == text)  # the model's vocabulary lacks a few bytes of rare characters
    decoder = tokenizer.decoder()
    shown = ""
    for token in ids:
        shown += decoder.push([token])
        assert text.startswith(shown)
    assert decoder.finish() == ""


def test_ids_without_text_are_skipped(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([2, 10**6]) == ""
    assert tokenizer.decoder().push([2, 10**6]) == ""


@pytest.mark.parametrize(
    "messages", [[{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": "\ud800"}]]
)
def test_chats_that_the_template_refuses(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> None:
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(BadRequest) as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.field == "messages"


def test_text_with_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest) as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.field == "prompt"


def _with_config(tiny_folder: Path, target: Path, **changes: object) -> Path:
    """A copy of the tiny tokenizer with other fields in tokenizer_config.json."""
    shutil.copytree(tiny_folder, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def test_bos_is_added_where_the_config_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    plain = Tokenizer.load(tiny_folder)
    with_bos = Tokenizer.load(_with_config(tiny_folder, tmp_path / "bos", add_bos_token=True))
    assert with_bos.encode("hi") == [1, *plain.encode("hi")]
    assert with_bos.encode_chat([]) == plain.encode_chat([])


def test_bos_is_added_where_tokenizer_json_does(tiny_folder: Path, tmp_path: Path) -> None:
    """As in Llama 3's files, which have no `add_bos_token`."""
    plain = Tokenizer.load(tiny_folder)
    folder = _with_config(tiny_folder, tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode("hi") == [1, *plain.encode("hi")]
    assert Tokenizer.load(folder).encode_chat([]) == plain.encode_chat([])
    refused = _with_config(folder, tmp_path / "refused", add_bos_token=False)
    assert Tokenizer.load(refused).encode("hi") == plain.encode("hi")


def test_template_file_goes_first(tiny_folder: Path, tmp_path: Path) -> None:
    folder = _with_config(tiny_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if tools is not none %}tools{% endif %}hi")
    loaded = Tokenizer.load(folder)
    assert loaded.encode_chat([]) == loaded.encode("hi") != Tokenizer.load(tiny_folder).encode_chat([])
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadModel, match=r"chat_template\.jinja"):
        Tokenizer.load(folder)


def test_template_that_raises(tiny_folder: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    refusing = Tokenizer.load(_with_config(tiny_folder, tmp_path / "refusing", chat_template=template))
    with pytest.raises(BadRequest, match=r"messages: .*roles must alternate"):
        refusing.encode_chat([])


def test_template_cannot_reach_python(tiny_folder: Path, tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    hostile = Tokenizer.load(_with_config(tiny_folder, tmp_path / "hostile", chat_template=template))
    with pytest.raises(BadRequest, match="messages"):
        hostile.encode_chat([{"role": "user", "content": "hi"}])


def test_model_without_template(tiny_folder: Path, tmp_path: Path) -> None:
    bare = Tokenizer.load(_with_config(tiny_folder, tmp_path / "bare", chat_template=None))
    assert bare.encode("hi")
    with pytest.raises(BadRequest, match="no chat template"):
        bare.encode_chat([])


def test_other_kinds_of_tokenizer_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    Tokenizer.load(tiny_folder)
    folder = _with_config(tiny_folder, tmp_path / "other")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(BadModel, match="decoder"):
        Tokenizer.load(folder)
    path.unlink()
    with pytest.raises(BadModel, match=r"tokenizer\.json"):
        Tokenizer.load(folder)
