"""Our kernels against torch in float64, whatever the sizes, the layout and the number of threads; their barrier."""

import ctypes
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn import functional as F

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.trial import sample_blocks
from cocoa_engine.execution.native import build, operators
from cocoa_engine.execution.native.operators import untraced
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor
from tests.helpers.in_threads import join, start, threads
from tests.helpers.libraries import MULTIPLIES_PAIRS, forget, needs_kernels

pytestmark = needs_kernels

LOWEST = torch.finfo(torch.float32).min


def misplaced(*sizes: int, by: int, halved: bool, generator: torch.Generator) -> torch.Tensor:
    """Random numbers that begin anywhere in a cache line, as a file's do."""
    drawn = torch.randn(torch.Size(sizes).numel() + by, generator=generator)
    return (drawn.bfloat16() if halved else drawn)[by:].view(sizes)


KINDS = ("float32", "bfloat16", "both in bfloat16")
"""Of weights; in the last kind, inputs are numbers in bfloat16 and may be rounded to it."""


@given(st.data())
def test_linear_layers(data: st.DataObject) -> None:
    pick, generator = data.draw, torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rows, inputs, by = pick(st.integers(1, 70)), pick(st.integers(1, 220)), pick(st.integers(0, 15))
    kind = pick(st.sampled_from(KINDS))
    weights, offsets = [], []
    for out in pick(st.lists(st.integers(1, 90), min_size=1, max_size=3)):
        weights.append(misplaced(out, inputs, by=by, halved=kind != "float32", generator=generator))
        offsets.append(torch.randn(out, generator=generator) if pick(st.booleans()) else None)
    x = torch.randn(rows, inputs + pick(st.integers(0, 3)), generator=generator)
    if kind == "both in bfloat16":
        x = x.bfloat16().float()
    x[:, inputs:] = torch.nan
    x = x[:, :inputs]  # rows need not touch
    if pick(st.booleans()):
        x = x.t().contiguous().t()  # seen from the side
    with threads(pick(st.sampled_from([1, 2, 3]))):
        found = operators.Linears(weights, offsets, rounds_inputs=kind == "both in bfloat16")(x)
    exact = [
        F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        for weight, offset in zip(weights, offsets, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(exact, dim=1).float(), atol=1e-4, rtol=1e-4)


def test_inputs_may_be_rounded_to_bfloat16() -> None:
    """Where the processor multiplies bfloat16 by bfloat16; then for few rows and for many alike."""
    weight, x = torch.randn(71, 100).bfloat16(), torch.randn(600, 100)
    linears = operators.Linears([weight], [None], rounds_inputs=True)
    found = [linears(x[:rows]) for rows in (1, 7, 8, 9, 17, 64, 600)]
    exact = F.linear(x, weight.float())
    expected = F.linear(x.bfloat16().float(), weight.float()) if MULTIPLIES_PAIRS else exact
    for each in found:
        torch.testing.assert_close(each, expected[: len(each)], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(operators.Linears([weight], [None])(x), exact, atol=1e-4, rtol=1e-4)


@given(st.data())
def test_a_row_is_the_same_to_the_bit_whatever_is_fed_with_it(data: st.DataObject) -> None:
    """In a decoding step, up to 48 rows; in attention, over the same slots."""
    pick, generator = data.draw, torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    first, inputs = pick(st.integers(1, 48)), pick(st.sampled_from([16, 61, 576, 1536]))
    rows = min(first + pick(st.integers(0, 47)), 48)
    kind, outs, by = pick(st.sampled_from(KINDS)), pick(st.integers(1, 70)), pick(st.integers(0, 15))
    weight = misplaced(outs, inputs, by=by, halved=kind != "float32", generator=generator)
    linears = operators.Linears([weight], [None], rounds_inputs=kind == "both in bfloat16")
    x = torch.randn(rows, inputs, generator=generator)
    assert torch.equal(linears(x)[:first], linears(x[:first]))
    keys, values = torch.randn(2, 2, 75, 24, generator=generator)
    query = torch.randn(6, rows, 24, generator=generator)
    together = operators.attend(query, keys, values, None, 0, scale=0.4)
    assert torch.equal(together[:first], operators.attend(query[:, :first], keys, values, None, 0, scale=0.4))


@given(st.data())
def test_attention(data: st.DataObject) -> None:
    pick, generator = data.draw, torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    kv_heads, groups, width = (pick(st.integers(1, most)) for most in (4, 9, 9))
    head_dim = pick(st.sampled_from([1, 8, 16, 24, 64, 80, 128, 256]))
    slots, spare = pick(st.integers(1, 150)), pick(st.integers(0, 5))
    masked = pick(st.sampled_from(["none", "from", "anywhere", "all"]))
    keys, values = torch.randn(2, kv_heads, slots + spare, head_dim, generator=generator)[:, :, :slots]
    query = torch.randn(width, kv_heads * groups, head_dim, generator=generator).transpose(0, 1)
    query = query * pick(st.sampled_from([0.1, 1.0, 30.0]))
    seen_by_all = {"none": slots, "from": slots // 2, "anywhere": 0, "all": 0}[masked]
    hidden = torch.rand(width, slots, generator=generator) < 0.6
    hidden[:, :seen_by_all] = False
    if masked == "anywhere":
        hidden[:, -1] = False
    if masked == "all":
        hidden[0] = True  # a row of lowest numbers is an even one, as in torch
    mask = torch.zeros(width, slots).masked_fill_(hidden, LOWEST)
    assert operators.can_attend(query, keys, values)
    with threads(pick(st.sampled_from([1, 2, 3, 4]))):
        own = None if masked == "none" else mask[:, seen_by_all:].contiguous()
        found = operators.attend(query, keys, values, own, seen_by_all, scale=head_dim**-0.5)
    scores = query.double() @ keys.double().repeat_interleave(groups, 0).transpose(1, 2) * head_dim**-0.5
    weights = (scores.float() + mask).double().softmax(dim=-1)
    exact = (weights @ values.double().repeat_interleave(groups, 0)).transpose(0, 1).reshape(width, -1)
    torch.testing.assert_close(found, exact.float(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 7, 30])
def test_what_bfloat16_is_given_it_gives_back(rows: int) -> None:
    """Summed up in float32 and rounded once."""
    weight, bias, x = (torch.randn(size).bfloat16() for size in ((40, 70), (40,), (rows, 70)))
    exact = F.linear(x.double(), weight.double(), bias.double())
    found = operators.Linears([weight], [bias])(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("slot", [0, 40, 149])
def test_what_is_not_a_number_stays_in_its_own_head_and_row(slot: int, count: int) -> None:
    """A broken model is told from what it says, so nothing may hide it."""
    query, (keys, values) = torch.randn(4, 3, 24), torch.randn(2, 2, 150, 24)
    keys[:, 100] *= 50  # scores that are higher than those beside what is not a number
    expected = operators.attend(query, keys, values, None, 0, scale=0.4)
    keys[1, slot] = math.nan
    with threads(count):
        found = operators.attend(query, keys, values, None, 0, scale=0.4)
    torch.testing.assert_close(found[:, :48], expected[:, :48])
    assert found[:, 48:].isnan().all()
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    x[1, 5] = torch.nan
    for each in (weight, weight.bfloat16()):
        y = operators.Linears([each], [None], rounds_inputs=True)(x)
        assert y[1].isnan().all()
        assert not y[[0, 2]].isnan().any()


def test_what_the_kernels_cannot_read_is_told() -> None:
    good = torch.randn(2, 3, 16)
    assert operators.can_attend(good, good, good)
    assert not operators.can_attend(good.double(), good.double(), good.double())
    assert not operators.can_attend(good, good.transpose(1, 2).contiguous().transpose(1, 2), good)
    assert not operators.can_attend(good, good, torch.randn(2, 3, 8))
    assert operators.is_readable(good[0])
    for logits in (good[0].double(), good[0].t(), good[0].to("meta")):
        assert not operators.is_readable(logits)
    weight, memory = torch.randn(4, 4), torch.zeros(4 * 6 * 16 + 4, dtype=torch.uint8).numpy()
    placed, misaligned = (
        torch.frombuffer(memory, dtype=torch.float32, offset=by, count=96).view(6, 16) for by in (0, 2)
    )
    blocks, other = (sample_blocks("Q4_0", 8, 256, torch.Generator().manual_seed(5)) for _ in range(2))
    other.kind = "Q2_K"
    for weights in ([weight, weight], [weight.bfloat16()], [placed], [blocks]):
        assert operators.can_multiply(weights)
    across = BlockTensor(blocks.blocks[:, : blocks.blocks.shape[1] // 2], "Q4_0")
    for each in (weight.t(), weight.half(), weight.to("meta"), misaligned, other, across):
        assert not operators.can_multiply([each])
    assert not operators.can_multiply([weight, weight.bfloat16()])


def test_an_input_of_another_width_is_refused() -> None:
    linears = operators.Linears([torch.randn(8, 40)], [None])
    for x in (torch.randn(2, 10), torch.randn(40), torch.randn(2, 40, device="meta")):
        with pytest.raises(RuntimeError, match=r"needs x \[rows, 40\]"):
            linears(x)


# Weights in the blocks of GGUF files: what the float32 weights that they stand for give.


def _inputs(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) / columns**0.5


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_every_type_gives_what_its_numbers_give(kind: str) -> None:
    assert trial.block_obstacle() is None
    for outputs in (1, 6, 37, 130):
        weight = sample_blocks(kind, outputs, 512, torch.Generator().manual_seed(outputs))
        exact, bias = weight.dequantized(), torch.randn(outputs)
        linears, index = operators.Linears([weight], [bias]), torch.tensor([outputs - 1, 0, 0, outputs // 2])
        torch.testing.assert_close(operators.unpack(weight, index), weight.rows(index), atol=1e-7, rtol=1e-6)
        for count in (1, 2):
            with threads(count):
                for rows in (*range(1, 13), 20, 47, 48, 49, 100):
                    x = _inputs(rows, 512)
                    torch.testing.assert_close(linears(x), F.linear(x, exact, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_row_of_blocks_is_the_same_to_the_bit_whatever_is_fed_with_it(kind: str) -> None:
    weight = sample_blocks(kind, 43, 768, torch.Generator().manual_seed(2))
    linears, x = operators.Linears([weight], [None]), _inputs(48, 768)
    alone = torch.cat([linears(row[None]) for row in x])
    for rows in range(2, 49):
        assert torch.equal(linears(x[:rows]), alone[:rows]), rows


def test_layers_of_several_types_in_one_call() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = [sample_blocks(kind, 10, 256, generator) for kind in ("Q4_K", "Q6_K", "Q8_0")]
    weights.append(torch.randn(7, 256, generator=generator))
    assert operators.can_multiply(weights)
    x = _inputs(3, 256)
    expected = torch.cat([F.linear(x, each + 0) for each in weights], dim=1)
    torch.testing.assert_close(operators.Linears(weights, [None] * 4)(x), expected, atol=1e-5, rtol=1e-5)


# Under torch.compile, calls are not traced, in whatever order compiler and kernels are used.


@pytest.mark.slow
@pytest.mark.parametrize("used_before", [False, True])
def test_linear_layers_run_outside_of_the_graph(used_before: bool) -> None:
    seen = []
    layer = operators.Linears([torch.randn(24, 16)], [None])

    @untraced
    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return torch.from_numpy(x.numpy() * 2)  # an address, as the kernels take it: no tracer could follow

    if used_before:
        run(torch.ones(3, 16))
    compiled = torch.compile(lambda x: torch.relu(layer(run(x + 1))), backend="eager")
    counters.clear()
    for value in (1.0, 2.0):
        assert torch.equal(
            compiled(torch.full((3, 16), value)), torch.relu(layer(torch.full((3, 16), 2 * (value + 1))))
        )
    assert seen == [False] * (2 + used_before)
    assert used_before or sum(counters["graph_break"].values()) > 0


# Their barrier: no thread passes it early, and a thread that waits long sleeps instead of spinning.

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

EXPOSED = """
#include <thread>

extern "C" {

Barrier* test_barrier() { return new Barrier; }

void test_wait(Barrier* barrier, long team) { barrier->wait(team); }

void test_free(Barrier* barrier) { delete barrier; }

// How often a thread saw another one in another round.
long test_rounds(long team, long rounds) {
    Barrier barrier;
    std::vector<long> at(team);
    std::atomic<long> wrong{0};
    std::vector<std::thread> threads;
    for (long own = 0; own < team; own++)
        threads.emplace_back([&, own] {
            for (long round = 1; round <= rounds; round++) {
                if (round % 50 == 0 && own == round % team) usleep(2000);  // the others fall asleep
                at[own] = round;
                barrier.wait(team);
                for (long other : at) wrong += other != round;
                barrier.wait(team);
            }
        });
    for (auto& thread : threads) thread.join();
    return wrong;
}

}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source, folder = build.SOURCE.read_text(), tmp_path_factory.mktemp("barrier")
    includes = "\n".join(line for line in source.splitlines() if line.startswith("#include ") and "blocks" not in line)
    barrier = source[source.index("class Barrier {") : source.index("struct Buffers {")]
    (folder / "barrier.cpp").write_text(f"{includes}\n{barrier}\n{EXPOSED}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCE", folder / "barrier.cpp")
        made = ctypes.CDLL(str(build._compile(build._compiler(), folder)))
    made.test_barrier.restype = ctypes.c_void_p
    made.test_wait.argtypes = [ctypes.c_void_p, ctypes.c_long]
    made.test_free.argtypes = [ctypes.c_void_p]
    made.test_rounds.argtypes = [ctypes.c_long, ctypes.c_long]
    made.test_rounds.restype = ctypes.c_long
    return made


@pytest.fixture
def busy() -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for other in others:
        other.kill()
        other.wait(60)


def state(thread: int) -> str:
    """The state of a thread of this process: R while it runs or could, S while it sleeps."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
@linux
@pytest.mark.usefixtures("busy")
def test_who_waits_sleeps_until_the_others_come(library: ctypes.CDLL) -> None:
    barrier = library.test_barrier()
    waiting = [start(lambda: library.test_wait(barrier, 3)) for _ in range(2)]
    ends, asleep = time.monotonic() + 60, 0
    while asleep < 20:  # once might be on the way there
        assert time.monotonic() < ends, "a thread that waits keeps a processor"
        time.sleep(0.01)
        states = [state(thread.native_id) for thread in waiting if thread.native_id is not None]
        asleep = asleep + 1 if states == ["S", "S"] else 0
    assert all(thread.is_alive() for thread in waiting)
    library.test_wait(barrier, 3)
    join(waiting)
    library.test_free(barrier)


@pytest.mark.slow
@linux
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("team", [2, 5])
def test_nobody_is_a_round_ahead(library: ctypes.CDLL, team: int) -> None:
    assert library.test_rounds(team, 500) == 0


@linux
@pytest.mark.usefixtures("busy")
def test_two_threads_compute_the_same_beside_busy_processes() -> None:
    forget()
    with threads(2):
        assert trial.obstacle() is None
    forget()
