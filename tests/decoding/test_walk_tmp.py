from __future__ import annotations
import json
from typing import Any
import torch
from hypothesis import given
from hypothesis import strategies as st
from cocoa_engine.decoding.grammar import GrammarProcessor, json_rule
from tests.helpers.mutations import fuzz
from tests.helpers.tiny_models import EOS, VOCAB_SIZE, sentencepiece_like_tokenizer, tiny_tokenizer

LEAVES = st.sampled_from([{"type": "string"}, {"type": "integer"}, {"enum": ["a", "ab", "b"]}, {"type": "null"}, {"type": "string", "pattern": "^[ab]*c$"}, {"const": 12}, True])
NAMES = st.sampled_from(["a", "ab", "item", "name"])

def objects(values):
    return st.dictionaries(NAMES, values, min_size=1, max_size=3).flatmap(lambda p: st.sets(st.sampled_from(sorted(p))).map(lambda r: {"type":"object","properties":p,"required":sorted(r),"additionalProperties":False}))
SCHEMAS = st.recursive(LEAVES, lambda inner: st.one_of(objects(inner), st.lists(inner,min_size=2,max_size=3).flatmap(lambda l: st.sampled_from([{"anyOf":l}])), inner.map(lambda i: {"type":"array","items":i})), max_leaves=6)

@fuzz(200)
@given(st.lists(SCHEMAS, min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=60), st.booleans())
def test_walk(schemas, steps, pieces):
    rules = [f'tool_{i}: "{{\\"name\\": \\"{"f"*(i+1)}\\", \\"arguments\\": " json_{i} "}}"\njson_{i}: {json_rule(s if isinstance(s,dict) else {})}' for i, s in enumerate(schemas)]
    grammar = "\n".join(["start: " + " | ".join(f"tool_{i}" for i in range(len(schemas))), *rules])
    tokenizer = TOKS[pieces]
    processor = GrammarProcessor(grammar, tokenizer)
    kept = processor.for_prompt([])
    branches = [[]]
    def mask(p, ids):
        return p(torch.tensor([ids], dtype=torch.long), torch.zeros(1, VOCAB_SIZE))[0] == 0
    for which, choice in steps:
        at = which % len(branches)
        branch = branches[at]
        m = mask(kept, branch)
        assert torch.equal(m, mask(processor.for_prompt([]), branch)), tokenizer.decode(branch)
        allowed = m.nonzero().flatten().tolist()
        if choice % 7 == 6: 
            branches.append(branch[:choice % (len(branch)+1)])
        elif choice % 29 == 5:
            branches[at] = branch[:choice % (len(branch)+1)]
        elif branch[-1:] != [EOS]:
            branches[at] = [*branch, allowed[choice % len(allowed)]]
TOKS = [tiny_tokenizer(), sentencepiece_like_tokenizer()]
