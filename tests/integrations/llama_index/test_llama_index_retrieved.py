"""The attention of a span by the source nodes of a response."""

from __future__ import annotations

from llama_index.core.schema import NodeWithScore, TextNode

from cocoa_integrations.llama_index.retrieved import Retrieval, add_nodes, by_source_node

NODES = [NodeWithScore(node=TextNode(id_=name, text=name)) for name in "abc"]


def test_values_are_in_the_order_of_the_source_nodes() -> None:
    assert by_source_node([0.1, 0.2], ["c", "a"], NODES) == [0.2, None, 0.1]


def test_values_of_other_texts_than_nodes_have_no_place() -> None:
    assert by_source_node([0.1, 0.2], ["x", "y"], NODES) is None
    assert by_source_node([0.1, 0.2], [], NODES) is None  # sources that the caller named


def test_a_source_node_that_a_response_has_twice() -> None:
    assert by_source_node([0.1, 0.2], ["c", "a"], [*NODES, NODES[2]]) == [0.2, None, 0.1, 0.1]


def test_every_node_is_collected_once() -> None:
    with Retrieval() as retrieval:
        add_nodes([NODES[1], NODES[0], NODES[1]])
        add_nodes([NODES[0], NODES[2], NODES[2]])
    assert [node.node_id for node in retrieval.nodes] == ["b", "a", "c"]
