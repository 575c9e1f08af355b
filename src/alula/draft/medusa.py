"""Medusa heads (Cai et al., arXiv 2401.10774): each guesses one token further ahead from the LM head's input.

All heads read the same feature, so a tree costs a single small pass and no keys or values; for the same reason a
head does not know which tokens its siblings' parents carry. Suffixes: B growing sequences, F frontier rows, D target
hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from alula.cache import KVShape, Transaction
from alula.draft.drafter import grows, root_only_trees
from alula.draft.medusa_files import MedusaConfig
from alula.draft.policy import TreePolicy
from alula.draft.propose import Proposer
from alula.kernels.protocol import Kernels, Linear
from alula.kernels.stack import FINAL
from alula.sequence import PlanItem, StepPlan
from alula.tree import DraftTree, IntArray, TreeShape


class MedusaHeads:
    """The residual blocks of all heads, in the target's dtype, over its kernels.

    weights: by official name, checked by the loader. logits: the target's LM head, [B, D] -> fp32 [B, V], for heads
    that have none of their own.
    """

    def __init__(
        self,
        config: MedusaConfig,
        weights: Mapping[str, torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        kernels: Kernels,
    ) -> None:
        self.count = config.heads
        self._kernels, self._logits = kernels, logits
        names = [[f"{head}.{layer}.linear" for layer in range(config.layers)] for head in range(config.heads)]
        self._blocks = [[_gated(kernels, weights, name) for name in blocks] for blocks in names]
        own = [f"{head}.{config.layers}.weight" for head in range(config.heads)]
        self._own = [kernels.prepare_linear(weights[name], out_dtype=torch.float32) for name in own if name in weights]

    def logits(self, features_BD: torch.Tensor, head: int) -> torch.Tensor:
        """fp32 [B, V]: what head `head` says of the token head + 2 after the features' own."""
        states_BD = features_BD
        for block in self._blocks[head]:
            gate_up_BI = self._kernels.linear(states_BD, block)
            states_BD = states_BD + self._kernels.gated(gate_up_BI, "silu")
        return self._kernels.linear(states_BD, self._own[head]) if self._own else self._logits(states_BD)


def _gated(kernels: Kernels, weights: Mapping[str, torch.Tensor], name: str) -> Linear:
    """The block's linear as the gate of an MLP whose other half is one: silu(Wx + b) by the row-local kernel."""
    weight_DD, bias_D = weights[f"{name}.weight"], weights[f"{name}.bias"]
    doubled_ID = torch.cat([weight_DD, torch.zeros_like(weight_DD)])
    return kernels.prepare_linear(doubled_ID, torch.cat([bias_D, torch.ones_like(bias_D)]))


class MedusaDrafter:
    """Medusa heads and their tree policy. It keeps no keys or values, only reads the last true feature.

    target_size: V.
    """

    name = "medusa"
    kv_shapes: tuple[KVShape, ...] = ()
    kv_first = 1
    taps = (FINAL,)

    def __init__(self, heads: MedusaHeads, policy: TreePolicy, kernels: Kernels, target_size: int) -> None:
        self.heads, self.policy = heads, policy
        self._kernels, self._target_size = kernels, target_size

    def scratch(self, shape: TreeShape) -> int:
        return 0

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees = root_only_trees(plan)
        read = [_read(item, txn) for item in plan.items]
        growing = [(place, feature_D) for place, feature_D in enumerate(read) if feature_D is not None]
        if growing:
            items = [plan.items[place] for place, _ in growing]
            grown = self._grow(items, torch.stack([feature_D for _, feature_D in growing]))
            for (place, _), tree in zip(growing, grown, strict=True):
                trees[place] = tree
        return trees

    def _grow(self, items: Sequence[PlanItem], features_BD: torch.Tensor) -> list[DraftTree]:
        sequences = [item.sequence for item in items]
        shapes = [item.shape for item in items if item.shape is not None]
        growth = self.policy.growth(_roots(items), shapes, self._kernels)
        proposer = Proposer(self.policy, sequences, None, self._target_size, self._kernels)
        paths: list[tuple[int, ...]] = [()] * len(items)
        for head in range(self.heads.count):
            frontier = growth.frontier
            if not len(frontier):
                break
            if head:
                steps = zip(frontier.origin_F.tolist(), frontier.tokens_F.tolist(), strict=True)
                paths = [(*paths[origin], token) for origin, token in steps]
            proposer.expand(growth, self.heads.logits(features_BD, head), paths, rows_F=frontier.lane_F)
        return proposer.finish(growth)


def _read(item: PlanItem, txn: Transaction) -> torch.Tensor | None:
    """Take what waits in the queue off it; the feature before the root [D] where a tree is to grow."""
    sequence = item.sequence
    queue, root = sequence.features, sequence.root_position
    boundary_D = txn.boundary_feature(sequence.id)
    stop = min(root, queue.stop) + 1
    if stop > txn.draft_length(sequence.id):
        txn.fill_draft(sequence.id, stop)
    if not grows(item) or stop <= root:
        return None
    if queue.start < root:
        return queue.read(root - 1, root)[0]
    if boundary_D is None:
        raise RuntimeError(f"feature {root - 1} is neither queued nor cached")
    return boundary_D


def _roots(items: Sequence[PlanItem]) -> IntArray:
    return np.array([item.sequence.tokens[-1] for item in items])
