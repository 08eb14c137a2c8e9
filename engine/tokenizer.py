"""Text to token ids and back, for a model folder with a byte-level BPE tokenizer.json. No torch here."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import BadModel, BadRequest
from engine.json_file import read_json_object

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one by one: the library's threads gain nothing


class Tokenizer:
    """Encodes prompts and chats, decodes ids. Safe to share between threads: nothing changes after `load`.

    vocab_size: ids lie in [0, vocab_size), added tokens included.
    eos_token_ids: ids that end a generation, from generation_config.json, else the tokenizer's eos token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None,
    ) -> None:
        """Use `load`. bos_token_id: put before every encoded text; None adds nothing."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self._backend = backend
        self._prefix = [] if bos_token_id is None else [bos_token_id]
        self._chat_template = chat_template
        self._special_names = {
            index: token.content.encode()
            for index, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._token_bytes = _token_bytes(backend)

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and, where they are there, generation_config.json and
        chat_template.jinja.

        Raises: BadModel: a file is missing or damaged, or the tokenizer is not byte-level BPE.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for every cause
            raise BadModel(f"{folder / 'tokenizer.json'}: cannot be read: {error}") from error
        config = read_json_object(folder / "tokenizer_config.json")
        generation = folder / "generation_config.json"
        return Tokenizer(
            backend,
            _added_bos_token_id(backend, config),
            _eos_token_ids(backend, config, read_json_object(generation) if generation.exists() else {}),
            ChatTemplate.parse(config | _template_file(folder)),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text. Nothing is added, except BOS where the model's files ask for it.

        The spelling of a special token ("<|im_end|>") in the text becomes that token.
        Raises: BadRequest: on `prompt`: the text holds a lone surrogate, which no UTF-8 can carry.
        """
        return [*self._prefix, *self._encode("prompt", text)]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn. The template alone decides on BOS.

        Args:
            messages: each with `role` and `content`.
        Raises: BadRequest: on `messages`: the model has no chat template, its template refuses them, or a text holds
            a lone surrogate.
        """
        if self._chat_template is None:
            raise BadRequest("messages", "this model has no chat template; use plain completions")
        return self._encode("messages", self._chat_template.render(messages))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ids, without special tokens; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        return b"".join(map(self._bytes, token_ids)).decode("utf-8", errors="replace")

    def decoder(self) -> IncrementalDecoder:
        """A decoder for one stream of tokens."""
        return IncrementalDecoder(self._token_bytes)

    def spelling(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole characters; of a special token, which has no text, those of
        its name ("<|im_end|>"); of an unknown id none."""
        return self._token_bytes.get(token_id) or self._special_names.get(token_id, b"")

    def special_token_ids(self) -> list[int]:
        """Ids of the tokens that stand for no text."""
        return sorted(self._special_names)

    def plain_encoder(self) -> Callable[[str], list[int]]:
        """Encodes text in which the spelling of a special token is text like any other."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True

        def encode(text: str) -> list[int]:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids

        return encode

    def _encode(self, field: str, text: str) -> list[int]:
        """`fast`: without each token's place in the text, which takes as long again for long texts."""
        try:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # what the library says of text that is not Unicode
            raise BadRequest(field, "must be valid Unicode text, without lone surrogates") from error
        return ids

    def _bytes(self, token_id: int) -> bytes:
        return self._token_bytes.get(token_id, b"")


class IncrementalDecoder:
    """Decodes tokens as they come; O(1) amortised per token. All pushes and `finish` join to `decode` of all ids."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        """token_bytes: the bytes of each token id; ids without an entry have no text."""
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text whose characters are complete; the bytes of a split character wait for the rest."""
        return self._utf8.decode(b"".join(self._token_bytes.get(token_id, b"") for token_id in token_ids))

    def finish(self) -> str:
        """What still waits: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)


class ChatTemplate:
    """A model's chat template. It comes with the weights, from anyone: it runs sandboxed, over read-only input."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises: BadModel: the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadModel(f"tokenizer_config.json: chat_template: {error}") from error
        self._special_tokens = special_tokens

    @staticmethod
    def parse(config: Mapping[str, Any]) -> ChatTemplate | None:
        """The template of a tokenizer_config.json, which may also be a list of named ones; None where there is none."""
        source = config.get("chat_template")
        if isinstance(source, list):
            source = next((item["template"] for item in source if item["name"] == "default"), None)
        if source is None:
            return None
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return ChatTemplate(source, {name: text for name in names if (text := _token_text(config.get(name)))})

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant speaks. Raises: BadRequest: on `messages`: the template refuses them."""
        try:
            # `tools` and `documents` are None as in transformers: templates ask for "tools is not none".
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise BadRequest("messages", f"refused by the model's chat template: {error}") from error


def _refuse(message: str) -> None:
    """`raise_exception` of chat templates."""
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """As transformers has it: jinja2's own `tojson` would escape HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The bytes that each token stands for; special tokens stand for none.

    Raises: BadModel: the tokenizer does not decode by the byte-level alphabet.
    """
    decoder = json.loads(backend.to_str())["decoder"]
    if not decoder or decoder["type"] != "ByteLevel":
        raise BadModel(f"tokenizer.json: decoder: only 'ByteLevel' is supported, got {decoder and decoder['type']!r}")
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return {index: _spelled_bytes(token) for token, index in vocabulary.items() if index not in special}


def _spelled_bytes(token: str) -> bytes:
    """Undo the byte-level alphabet; a token with characters outside it is an added one and is plain text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Which byte each character spells: printable Latin-1 is itself, the other bytes are U+0100 onwards, in order.

    Source: bytes_to_unicode in GPT-2's encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER: Final = _byte_level_alphabet()


def _template_file(folder: Path) -> dict[str, str]:
    """The chat template where it has a file of its own, as newer models do; that one holds."""
    path = folder / "chat_template.jinja"
    try:
        return {"chat_template": path.read_text(encoding="utf-8")} if path.exists() else {}
    except (OSError, ValueError) as error:
        raise BadModel(f"{path}: cannot be read: {error}") from error


def _added_bos_token_id(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> int | None:
    """BOS where `add_bos_token` says so; without that field, where tokenizer.json itself adds it, as Llama 3's does."""
    added = config.get("add_bos_token")
    if added is False:
        return None
    bos_token_id = _special_token_id(backend, config, "bos_token")
    return bos_token_id if added or bos_token_id in backend.encode("").ids else None


def _eos_token_ids(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[int, ...]:
    declared = generation.get("eos_token_id")
    if isinstance(declared, list):
        return tuple(declared)
    if isinstance(declared, int):
        return (declared,)
    eos = _special_token_id(backend, config, "eos_token")
    return () if eos is None else (eos,)


def _special_token_id(backend: tokenizers.Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    """Id of the token that tokenizer_config.json names. Raises: BadModel: it is not in the vocabulary."""
    text = _token_text(config.get(name))
    if text is None:
        return None
    token_id: int | None = backend.token_to_id(text)
    if token_id is None:
        raise BadModel(f"tokenizer_config.json: {name}: {text!r} is not in the vocabulary")
    return token_id


def _token_text(declared: Any) -> str | None:
    """A special token is declared as its text or as an object that holds it."""
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None
