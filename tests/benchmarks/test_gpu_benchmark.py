"""The GPU measurement on a tiny model on the CPU: its record, and whether decoding follows the script."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("results") / "gpu.json"
    gpu.main(f"--tiny --device cpu --tokens 40 --prompt-tokens 8 --rounds 2 --out {out}".split())
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_decoder_is_timed(record: dict) -> None:
    assert list(record["decoders"])[:2] == [gpu.HUGGING_FACE, gpu.GREEDY]
    assert len(record["decoders"]) == 2 + len(gpu.RATES)
    for decoder in record["decoders"].values():
        times = decoder["ms_per_token"]
        assert 0 < times["lowest"] <= times["median"] <= times["highest"]
        assert len(decoder["rounds_ms"]) == 2
    assert record["decoders"][gpu.GREEDY]["ratio_to_greedy"]["median"] == 1
    assert list(record["step_ms"]) == [str(width) for width in gpu.WIDTHS]
    assert record["machine"]["torch"] == torch.__version__
    assert record["bandwidth_bound_ms"] == pytest.approx(record["bytes_read_per_step"] / 4.8e9)


@pytest.mark.parametrize("rate", gpu.RATES)
def test_the_script_is_followed(record: dict, rate: float) -> None:
    (decoding,) = [decoder["decoding"] for name, decoder in record["decoders"].items() if name.endswith(f" {rate}")]
    assert decoding["risk_points_per_token"] == rate
    # the prefill, then one pass for each token; the branches at the end grow on to their boundary
    assert 41 <= round(40 * decoding["forward_passes_per_token"]) <= 41 + 16
    assert decoding["candidates_per_risk_point"] == pytest.approx(2.8, abs=0.2)
    assert decoding["fed_per_token"] > 1 + rate / 2


def test_targets_do_not_apply_to_a_tiny_model(record: dict) -> None:
    assert len(record["targets"]) == 2 * len(gpu.RATES)
    assert all(target["met"] is None for target in record["targets"])
    decoders = {gpu.GREEDY: {}, "x": {"ms_per_token": {"median": 4.0}, "ratio_to_greedy": {"median": 1.2}}}
    assert [target["met"] for target in gpu.targets(decoders, applies=True)] == [True, False]
