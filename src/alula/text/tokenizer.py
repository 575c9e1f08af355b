"""The tokenizer of a checkpoint folder, with its chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from alula.config import AlulaError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Text to ids and back, by a `tokenizers` backend.

    chat_template: Jinja source, or None for models without one.
    special_tokens: the strings chat templates may use (bos_token, eos_token, ...).
    """

    def __init__(
        self, backend: Backend, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises AlulaError if unreadable."""
        config = _read_object(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        return cls(_read_backend(folder), _default_template(template), _named_tokens(config))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` drops from text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def eos_id(self) -> int | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str | bytes, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Bytes must be UTF-8. Raises AlulaError for anything that is not text."""
        return list(self.backend.encode(_clean(text), add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells an id; None for an id it does not have."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in the middle of a text; b"" for an id the vocabulary does not have."""
        spelled = self.token(token_id)
        if spelled is None:
            return b""
        if token_id in self._added:
            return spelled.encode()
        if self._is_byte_level:
            letters = _byte_letters()
            return b"".join(bytes([letters[char]]) if char in letters else char.encode() for char in spelled)
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("\u2581", " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the vocabulary spells bytes as letters, as GPT-2's does."""
        return '"ByteLevel"' in json.dumps(json.loads(self.backend.to_str()).get("decoder"))

    def check_ids(self, ids: Iterable[int], vocab_size: int | None = None) -> list[int]:
        """The ids as a list. Raises AlulaError for one outside the model's (default: the tokenizer's) vocabulary."""
        size = self.vocab_size if vocab_size is None else vocab_size
        checked = []
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < size:
                raise AlulaError(f"prompt token {index} is {token!r}: give ids from 0 to {size - 1}")
            checked.append(int(token))
        return checked

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model's template writes it. Raises AlulaError for what the template refuses."""
        if self.chat_template is None:
            raise AlulaError("the model has no chat template: give a prompt instead of messages")
        _check_messages(messages)
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = {**self.special_tokens, **variables}
        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except Exception as error:  # the template is a program of the checkpoint's author
            raise AlulaError(f"messages do not fit the model's chat template ({error}): change them") from error
        return str(rendered[0][0])

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of `render_chat`. Templates write their special tokens themselves, so none is added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, each at the start of a text and after a space (as in vLLM)."""
        spellings = dict.fromkeys(
            tuple(self.encode(text, add_special_tokens=False)) for word in words for text in (word, " " + word.lstrip())
        )
        return tuple(spelling for spelling in spellings if spelling)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the tokenizer, of its vocabulary alone, and of the chat template."""
        vocabulary = json.dumps(
            sorted(self.backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        )
        return {
            "tokenizer": _sha256(self.backend.to_str()),
            "vocabulary": _sha256(vocabulary),
            "chat_template": _sha256(self.chat_template or ""),
        }


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling: printable Latin-1 bytes stand for themselves, the others for the letters from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _clean(text: str | bytes) -> str:
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise AlulaError(f"the text is not valid UTF-8 (byte {error.start}): re-encode it as UTF-8") from None
    if not isinstance(text, str):
        raise AlulaError(f"the text is of type {type(text).__name__}: give a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AlulaError(
            f"the text is not valid UTF-8 (lone surrogate at character {error.start}): re-encode it as UTF-8"
        ) from None
    return text


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise AlulaError("messages is empty or no list: give a list of {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise AlulaError(f"message {index} has no role: give {{'role': ..., 'content': ...}}")
        if isinstance(message.get("content"), str):
            _clean(message["content"])


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AlulaError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise AlulaError(f"{path} holds no JSON object: download it again")
    return cast("dict[str, Any]", values)


def _read_backend(folder: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_backend(folder)
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every kind of damage
        raise AlulaError(f"{path} cannot be read ({error}): download it again") from None


def _convert_backend(folder: Path) -> Backend:
    """For checkpoints from before tokenizer.json, by the conversion of transformers."""
    from transformers import AutoTokenizer

    try:
        return cast("Backend", AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer)
    except Exception as error:  # noqa: BLE001 - whatever the conversion met, the mend is the same
        raise AlulaError(f"{folder} has no tokenizer.json and no tokenizer that converts ({error}): add one") from None


def _default_template(template: object) -> str | None:
    """Old configs may hold a list of named templates; `default` is the chat one."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return cast("str | None", template)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found
