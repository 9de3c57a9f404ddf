"""Attention over a sequence's slots is the plain formula over the slots that each token may see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.attention import attend
from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.forward.kv_store import KeyValues

NATIVE = [False] if trial.obstacle() else [False, True]


def plain(segment: Segment, query: torch.Tensor, seen: list[list[int]], scale: float) -> torch.Tensor:
    keys, values = segment.store.read(0, segment.end)
    groups = query.shape[0] // keys.shape[0]
    rows = []
    for token, slots in enumerate(seen):
        heads = []
        for head in range(query.shape[0]):
            scores = keys[head // groups, slots] @ query[head, token] * scale
            heads.append(scores.softmax(0) @ values[head // groups, slots])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.slow
@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 3]),
    committed=st.integers(1, 90),
    branches=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 7, 40]),
    seed=st.integers(0, 1000),
)
def test_attention_is_the_formula(
    kv_heads: int, groups: int, committed: int, branches: list[int], window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    own, positions, slot = [], [], committed
    for depth in branches:
        chain: list[int] = []
        for step in range(depth):
            chain = [*chain, slot]
            own.append(chain)
            positions.append(committed + step)
            slot += 1
    width = len(own)
    store = KeyValues(1, slot + seed % 3)  # with and without slots to spare
    keys, values = torch.randn(2, kv_heads, slot, 8, generator=generator)
    store.write(0, 0, keys, values)
    alone = branches == [1]
    segment = Segment(
        store,
        committed,
        [0] * width,
        positions,
        committed,
        chains=None if alone else [(chain[:-1], 1) for chain in own],
        tail_positions=[] if alone else positions,
    )
    query = torch.randn(kv_heads * groups, width, 8, generator=generator)
    place = {**{slot: slot for slot in range(committed)}, **{committed + n: at for n, at in enumerate(positions)}}
    seen = [
        [slot for slot in (*range(committed), *chain) if window is None or at - place[slot] < window]
        for chain, at in zip(own, positions, strict=True)
    ]
    for native in NATIVE:
        out = attend(segment, 0, query, scale=0.3, window=window, native=native)
        torch.testing.assert_close(out, plain(segment, query, seen, 0.3), atol=1e-5, rtol=1e-5)
