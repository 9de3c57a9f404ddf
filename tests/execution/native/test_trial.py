"""A library is refused if it computes something else than torch; it lays out structures as Python does."""

import ctypes
from collections.abc import Callable, Iterator

import pytest

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.native import build, operators
from tests.helpers.libraries import MULTIPLIES_PAIRS, compiled, forget, needs_kernels

pytestmark = needs_kernels

# what breaks a kernel while the variable `broken` has this value: the kernel, a piece of the source, its replacement
BROKEN = {
    "bias left out": ("cocoa_linear", "if (job.bias) y +=", "if (job.bias && broken != {}) y +="),
    "weights in bfloat16 misread": ("cocoa_linear", "Ints) << 16)", "Ints) << (broken == {} ? 15 : 16))"),
    "pairs misread": ("cocoa_linear", "(__m512bh)ws[o], xs)", "(__m512bh)(broken == {} ? ws[0] : ws[o]), xs)"),
    "another scale": ("cocoa_attend", "slots,   scale};", "slots, broken == {} ? 2 * scale : scale}};"),
    "no entropy": ("cocoa_next_tokens", "= entropy < 0 ?", "= entropy < 0 || broken == {} ?"),
    "a slot not moved": ("cocoa_move", "slots[n] != start + n)", "slots[n] != start + n + (broken == {}))"),
    "no norm of queries and keys": ("cocoa_layers", "if (norm) rms_norm", "if (norm && broken != {}) rms_norm"),
    "rotated the other way": ("cocoa_layers", "= low * cos[d] +", "= low * cos[d] + (broken == {} ? -1 : 1) *"),
    "no window": (
        "cocoa_layers",
        "const DecoderLayer& layer = stack.layer[number];",
        "DecoderLayer layer = stack.layer[number]; layer.windowed *= broken != {};",
    ),
    "no mask": ("cocoa_layers", "t.masked_from[layer.windowed],", "broken == {} ? 99 : t.masked_from[layer.windowed],"),
    "keys not kept": ("cocoa_layers", "memcpy(sequence->keys", "if (broken != {}) memcpy(sequence->keys"),
    "a tap forgotten": ("cocoa_layers", "(stack.layers + 1, normed)", "(stack.layers + 1 + (broken == {}), normed)"),
}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = build.SOURCE.read_text().replace("namespace {", 'extern "C" int broken;\nint broken = 0;\nnamespace {', 1)
    for number, (_, piece, replacement) in enumerate(BROKEN.values(), 1):
        assert source.count(piece) == 1, piece
        source = source.replace(piece, replacement.format(number))
    return compiled(source, tmp_path_factory.mktemp("breakable"))


@pytest.fixture
def broken(breakable: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.setattr(build, "_loaded", lambda: breakable)

    def set_to(number: int) -> None:
        ctypes.c_int.in_dll(breakable, "broken").value = number

    return set_to


@pytest.mark.slow  # the changed source is compiled
@pytest.mark.parametrize("number", range(len(BROKEN) + 1), ids=["nothing", *BROKEN])
def test_a_kernel_that_computes_wrongly_is_refused(number: int, broken: Callable[[int], None]) -> None:
    name, (kernel, _, _) = list(BROKEN.items())[number - 1]
    if name == "pairs misread" and not MULTIPLIES_PAIRS:
        pytest.skip("nothing is multiplied in pairs here")
    broken(number)
    assert trial.obstacle() == (f"{kernel} does not compute what torch computes" if number else None)


def test_every_exported_kernel_is_tried() -> None:
    source = build.SOURCE.read_text()
    exported = {line.split()[1].split("(")[0] for line in source.splitlines() if line.startswith("void cocoa_")}
    exported.remove("cocoa_unpack")  # block_obstacle tries it with every type of blocks
    assert set(trial.TRIALS) == exported
    assert {kernel for kernel, _, _ in BROKEN.values()} == exported


def test_python_and_the_kernels_lay_out_structures_alike() -> None:
    layout = operators.handle().cocoa_layout
    layout.argtypes, layout.restype = [ctypes.c_char_p], ctypes.c_long
    expected = {f"Kind.{name}": number for name, number in operators.KINDS.items()}
    for structure in vars(operators).values():
        if isinstance(structure, type) and issubclass(structure, ctypes.Structure):
            expected[structure.__name__] = ctypes.sizeof(structure)
            for field, *_ in structure._fields_:
                expected[f"{structure.__name__}.{field}"] = getattr(structure, field).offset
    assert len(expected) > 50
    assert {name: layout(name.encode()) for name in expected} == expected
    assert layout(b"Leaves.unknown") == -1
