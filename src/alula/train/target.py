"""The loaded model as training sees it: the serving decoder, run over whole texts.

The decoder is the one that serves, in the dtype that serves, so a head is trained on the numbers it will be fed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alula.cache import KVLayer
from alula.kernels.stack import FINAL
from alula.model.layers import FINAL_NORM, LM_HEAD
from alula.model.load import LoadedModel
from alula.tree import AttentionInput


class DecoderTarget:
    """Implements `FeatureTarget` over a `LoadedModel`."""

    def __init__(self, model: LoadedModel) -> None:
        tensors, config = model.tensors(), model.config
        self._decoder = model.decoder
        self.embedding_VD: Tensor = model.decoder.embedding_VD.float()
        self.lm_head_VD: Tensor = (
            self.embedding_VD if config.tied_head else tensors.get(LM_HEAD).to(model.device, model.dtype).float()
        )
        self.norm_D: Tensor = tensors.get(FINAL_NORM).to(model.device).float() + float(config.norm_offset)

    def states(self, tokens: Sequence[Sequence[int]], taps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """One packed forward over the texts, each with a page of keys of its own; see `FeatureTarget`."""
        lengths = [len(text) for text in tokens]
        where, slots = _packed(lengths, self._decoder.device)
        layers = tuple(
            KVLayer.zeros(shape, slots, self._decoder.dtype, where.slots_T.device) for shape in self._decoder.kv_shapes
        )
        rows_T = torch.tensor([token for text in tokens for token in text], device=self._decoder.device)
        hidden = self._decoder.forward(rows_T, where, layers, (*taps, FINAL))
        assert hidden.features_TF is not None
        width = hidden.final_TD.shape[1]
        taps_TF = hidden.features_TF[:, :-width].float()
        final_TD = hidden.final_TD.float()
        return list(zip(torch.split(taps_TF, lengths), torch.split(final_TD, lengths), strict=True))


def _packed(lengths: Sequence[int], device: torch.device) -> tuple[AttentionInput, int]:
    """Text b has page b, as long as the longest text; its row t reads keys 0 .. t. Also the number of slots."""
    page = max(lengths)
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    none_T = torch.zeros(len(positions_T), dtype=torch.int32, device=device)
    where = AttentionInput(
        positions_T=positions_T.to(device),
        slots_T=(sequence_T * page + positions_T).to(device),
        sequence_T=sequence_T.to(device, torch.int32),
        page_table_BP=torch.arange(len(lengths), dtype=torch.int32, device=device)[:, None],
        prefix_T=(positions_T + 1).to(device, torch.int32),
        tail_TE=none_T[:, None].clone(),
        tail_len_T=none_T.clone(),
        first_T=none_T.clone(),
        page_size=page,
    )
    return where, page * len(lengths)
