"""The attention of a span by the source nodes of a response."""

from __future__ import annotations

import pytest
from llama_index.core.schema import NodeWithScore, TextNode

from cocoa_integrations.llama_index.retrieved import by_source_node

NODES = [NodeWithScore(node=TextNode(id_=name, text=name)) for name in "abc"]


@pytest.mark.parametrize(
    ("names", "nodes", "expected"),
    [
        (["c", "a"], NODES, [0.2, None, 0.1]),
        (["c", "a"], [*NODES, NODES[2]], [0.2, None, 0.1, 0.1]),  # a response may have a node twice
        (["x", "y"], NODES, None),
        ([], NODES, None),  # sources that the caller named
    ],
)
def test_values_are_in_the_order_of_the_source_nodes(
    names: list[str], nodes: list[NodeWithScore], expected: list[float | None] | None
) -> None:
    assert by_source_node([0.1, 0.2], names, nodes) == expected
