"""How a grammar sees the vocabulary: the bytes that each token adds to the text."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from alula.config import AlulaError
from alula.text import Tokenizer

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

_NO_TEXT = b"\xff"
"""Never part of UTF-8, so no text that a grammar describes has a token that begins with it."""


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]) -> TokenizerInfo:
    """vocab_size: of the model, whose padded ids are never allowed. stop_ids: allowed where the text may end.

    Special tokens add nothing to the text, however they are spelled: only free parts may hold them.
    Raises AlulaError for a model without a stop token, whose output could not say that it is complete.
    """
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    if not stop_ids:
        raise AlulaError("structured_outputs wants an end, and the model names no EOS token: add eos_token_id to it")
    backend = deepcopy(tokenizer.backend)  # another thread may be using it, and the wrapper adds to it
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    read = xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=vocab_size, stop_token_ids=list(stop_ids))
    spelled = list(read.decoded_vocab)
    for token in tokenizer.special_ids:
        if token < vocab_size:
            spelled[token] = _NO_TEXT + spelled[token]
    return xgrammar.TokenizerInfo(
        spelled,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(stop_ids),
        add_prefix_space=read.add_prefix_space,
    )
