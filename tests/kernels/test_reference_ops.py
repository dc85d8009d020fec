"""Every fast arrangement equals its definition; definitions equal arithmetic written down differently here."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from freetoken_kernels.reference import ggml
from freetoken_kernels.reference.attention import attention, visible
from freetoken_kernels.reference.linear import Product, linear
from freetoken_kernels.reference.pointwise import glu, glu_gelu_tanh, layer_norm, rms_norm
from freetoken_kernels.reference.rope import lay_out, rotate
from freetoken_kernels.reference.routing import choose, mixture
from hypothesis import given, settings
from hypothesis import strategies as st

torch.set_num_threads(1)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 90),
    out=st.integers(1, 40),
    width=st.integers(1, 70),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_product_is_linear_in_fp32(rows: int, out: int, width: int, bias: bool, seed: int) -> None:
    x, weight = _random(rows, width, seed=seed), _random(out, width, seed=seed + 1)
    b = _random(out, seed=seed + 2) if bias else None
    torch.testing.assert_close(Product()(x, weight, b), linear(x, weight, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 64, 65])
@pytest.mark.parametrize("out", [8, 1100])  # 1100 rows of 512 are more than two tiles
def test_product_of_bf16_weights(rows: int, out: int) -> None:
    x, weight = _random(rows, 512), _random(out, 512, seed=1).bfloat16()
    y, exact = Product()(x, weight), linear(x, weight)
    assert y.is_contiguous() and y.dtype == torch.float32
    rounding = 2**-7 if rows <= 3 else 1e-5  # few rows: x and y are rounded to bf16's 8 bits
    assert float((y - exact).abs().max() / exact.abs().max()) < rounding


def test_scratch_does_not_leak_between_products() -> None:
    product, x = Product(), _random(5, 16)
    large, small = _random(9, 16, seed=1).bfloat16(), _random(3, 16, seed=2).bfloat16()
    first = product(x, large)
    kept = first.clone()
    torch.testing.assert_close(product(x, small), linear(x, small), rtol=1e-4, atol=1e-4)
    assert torch.equal(first, kept)


@given(seed=st.integers(0, 99), eps=st.sampled_from([1e-6, 0.02, 1.0]))
@settings(max_examples=20, deadline=None)
def test_rms_norm_is_torchs(seed: int, eps: float) -> None:
    x, weight = _random(3, 5, 17, seed=seed) * 10, _random(17, seed=seed + 1)
    torch.testing.assert_close(
        rms_norm(x, weight, torch.tensor(eps)), torch.nn.functional.rms_norm(x, (17,), weight, eps)
    )


def test_layer_norm_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    expected = (x - 3) / math.sqrt(3.5 + 0.5) * 2 + 1
    torch.testing.assert_close(layer_norm(x, torch.full((4,), 2.0), torch.ones(4), 0.5), expected)


def test_glu_forms() -> None:
    gate, up = _random(4, 6) * 3, _random(4, 6, seed=1) * 3
    torch.testing.assert_close(glu(gate.clone(), up.clone()), torch.nn.functional.silu(gate) * up)
    g, u = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
    expected = (u + 1) * g * torch.sigmoid(1.702 * g)
    torch.testing.assert_close(glu(gate.clone(), up.clone(), alpha=1.702, limit=0.8, up_shift=1.0), expected)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(glu_gelu_tanh(gate.clone(), up.clone()), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("dim", [8, 12])
def test_rope_turns_pairs_in_the_complex_plane(interleaved: bool, tail: bool, dim: int) -> None:
    x, angles = _random(5, 2, 12), _random(5, dim // 2, seed=1) * 3
    y = rotate(x, *lay_out(angles, 1.25, interleaved=interleaved), interleaved=interleaved, tail=tail)
    body, turned = (t[..., -dim:] if tail else t[..., :dim] for t in (x, y))
    rest, kept = (t[..., : 12 - dim] if tail else t[..., dim:] for t in (x, y))
    pairs = (lambda t: (t[..., 0::2], t[..., 1::2])) if interleaved else (lambda t: t.chunk(2, -1))
    expected = torch.complex(*pairs(body)) * torch.polar(torch.full_like(angles, 1.25), angles)[:, None]
    torch.testing.assert_close(torch.complex(*pairs(turned)), expected)
    assert torch.equal(rest, kept)


def test_visible_is_causal_and_windowed() -> None:
    assert visible(2, 2, 0, 4, None).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible(2, 2, 0, 4, 2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_attention_sinks_take_their_share() -> None:
    q, k, v = _random(3, 4, 8), _random(2, 5, 8, seed=1), _random(2, 5, 8, seed=2)
    mask = visible(2, 3, 0, 5, None)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = attention(q, k, v, mask, 0.3, sinks)
    for token in range(3):
        for head in range(4):
            scores = [math.exp(0.3 * float(q[token, head] @ k[head // 2, j])) for j in range(token + 3)]
            total = sum(scores) + math.exp(float(sinks[head]))
            expected = sum(s / total * v[head // 2, j] for j, s in enumerate(scores))
            torch.testing.assert_close(out[token, head], expected)


def test_choose_keeps_groups_by_their_two_best() -> None:
    values = torch.tensor([[9.0, 0.0, 0.0, 5.0, 5.0, 0.0, -1.0, -2.0, -3.0]])  # sums of two: 9, 10, -3
    assert choose(values, 1).tolist() == [[0]]
    assert choose(values, 2, groups=3, groups_kept=1).tolist() in ([[3, 4]], [[4, 3]])
    # an expert outside the kept groups stays out however negative the others are: masked with -inf, not 0
    assert set(choose(values - 20, 3, groups=3, groups_kept=1)[0].tolist()) == {3, 4, 5}


def test_mixture_by_hand() -> None:
    outputs = torch.arange(12.0).view(3, 2, 2)  # (experts, tokens, hidden)
    pick, weight = torch.tensor([[2, 0], [1, 2]]), torch.tensor([[0.5, 2.0], [1.0, -1.0]])
    expected = torch.stack((0.5 * outputs[2, 0] + 2 * outputs[0, 0], outputs[1, 1] - outputs[2, 1]))
    torch.testing.assert_close(mixture(pick, weight, outputs), expected)


@pytest.mark.parametrize(("name", "decode"), [("Q8_0", ggml.q8_0), ("Q4_0", ggml.q4_0), ("Q4_1", ggml.q4_1)])
def test_ggml_blocks_decode_as_the_gguf_package_does(name: str, decode) -> None:  # type: ignore[no-untyped-def]
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    numbers = (_random(7, 96) * 3).numpy()
    packed = gguf.quants.quantize(numbers, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, kind))
    assert torch.equal(decode(torch.from_numpy(packed).flatten()).view(7, 96), expected)


@given(data=st.binary(min_size=20 * 34, max_size=20 * 34))
@settings(max_examples=30, deadline=None)
def test_ggml_blocks_of_any_bytes(data: bytes) -> None:
    """Whatever a file holds, decoding is the gguf package's, NaN included."""
    gguf = pytest.importorskip("gguf")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name, size, decode in (("Q8_0", 34, ggml.q8_0), ("Q4_0", 18, ggml.q4_0), ("Q4_1", 20, ggml.q4_1)):
        blocks = raw[: len(raw) // size * size]
        with numpy.errstate(all="ignore"):
            expected = gguf.quants.dequantize(blocks.view(-1, size).numpy(), gguf.GGMLQuantizationType[name])
        torch.testing.assert_close(decode(blocks).flatten(), torch.from_numpy(expected).flatten(), equal_nan=True)
