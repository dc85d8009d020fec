"""Name operations: what they do to names and shapes, and that their steps do to tensors what they say."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken.catalog import names
from freetoken.catalog.encodings import TensorInfo
from freetoken.core.errors import TensorMismatch
from tests.fakes.replay import apply

SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)


def stored(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    """Tensors by name; `__` in a keyword is a dot."""
    return {
        name: TensorInfo(name, "F32", shape, Path("x"), 0, 0)
        for name, shape in ((key.replace("__", "."), shape) for key, shape in shapes.items())
    }


def resolved(op: names.Op, **shapes: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[names.Step, ...]]]:
    found = names.resolve((op,), stored(**shapes))
    return {name: (tensor.shape, tensor.parts[0].steps) for name, tensor in found.items()}


@given(
    SHAPES,
    st.one_of(
        st.builds(names.Rows, st.integers(1, 4), st.integers(0, 3), st.integers(0, 6)),
        st.builds(names.Item, st.integers(0, 12)),
        st.builds(names.Stride, st.just(1), st.integers(2, 3)),
        st.just(names.Transpose()),
        st.just(names.AddOne()),
        st.builds(names.Squeeze, st.integers(0, 3)),
        st.builds(names.Unpermute, st.integers(1, 3)),
    ),
)
def test_a_step_predicts_its_shape_or_refuses(shape: tuple[int, ...], step: names.Step) -> None:
    try:
        after = step.shape(shape)
    except ValueError:
        return
    assert tuple(apply(step, torch.zeros(shape)).shape) == after


def test_drop_and_rename() -> None:
    assert resolved(names.Drop(r"^a\."), a__w=(1,), b__a__w=(2,)) == {"b.a.w": ((2,), ())}
    assert resolved(names.Rename(r"\.(q|k)_proj\.", r".\1."), x__q_proj__w=(1,)) == {"x.q.w": ((1,), ())}


def test_cut_takes_rows_of_every_group() -> None:
    """Two heads of (q q gate): the q rows are 0 1 3 4, the gate rows 2 5."""
    found = names.resolve((names.Cut("qg", (("q", 4), ("gate", 2)), groups=2),), stored(qg=(6, 1)))
    rows = torch.arange(6).reshape(6, 1)
    values = {name: apply(tensor.parts[0].steps[0], rows).flatten().tolist() for name, tensor in found.items()}
    assert values == {"q": [0, 1, 3, 4], "gate": [2, 5]}


def test_unstack_and_deinterleave_and_transpose() -> None:
    ops: names.NameMap = (
        names.Transposed("^packed$"),
        names.Unstack("^packed$", "e.{e}.both"),
        names.Deinterleave(r"^e\.(\d+)\.both$", (r"e.\1.gate", r"e.\1.up")),
    )
    found = names.resolve(ops, stored(packed=(2, 3, 4)))
    assert list(found) == ["e.0.gate", "e.0.up", "e.1.gate", "e.1.up"]
    x = torch.arange(24).reshape(2, 3, 4)
    for step in found["e.1.up"].parts[0].steps:
        x = apply(step, x)
    assert torch.equal(x, torch.arange(24).reshape(2, 3, 4)[1].T[1::2])
    assert found["e.1.up"].shape == (2, 3)


def test_plus_one_and_squeeze() -> None:
    assert resolved(names.PlusOne("norm"), norm=(4,)) == {"norm": ((4,), (names.AddOne(),))}
    assert resolved(names.Squeezed("conv", 1), conv=(4, 1, 3)) == {"conv": ((4, 3), (names.Squeeze(1),))}


def test_join_orders_by_number_and_fuse_by_the_list() -> None:
    joined = names.resolve((names.Join(r"shard_(\d+)", "table"),), stored(shard_10=(1, 2), shard_9=(5, 2)))
    assert joined["table"].shape == (6, 2)
    assert [part.tensor.name for part in joined["table"].parts] == ["shard_9", "shard_10"]
    fused = names.resolve(
        (names.Fuse(r"\.(v|q|k)\.", ("q", "k", "v"), ".qkv."),), stored(x__v__w=(1, 2), x__q__w=(2, 2))
    )
    assert [part.tensor.name for part in fused["x.qkv.w"].parts] == ["x.q.w", "x.v.w"]


@pytest.mark.parametrize("heads", [1, 3])
def test_unpermute_undoes_the_converters_order(heads: int) -> None:
    """llama.cpp's converter: reshape (heads, 2, dim / 2), swap, flatten; given here as numpy would do it."""
    rows = numpy.arange(heads * 8 * 5).reshape(heads * 8, 5)
    permuted = rows.reshape(heads, 2, 4, 5).swapaxes(1, 2).reshape(heads * 8, 5)
    assert torch.equal(apply(names.Unpermute(heads), torch.from_numpy(permuted)), torch.from_numpy(rows))


@pytest.mark.parametrize(
    ("ops", "shapes", "says"),
    [
        ((names.Rename("[ab]", "c"),), {"a": (1,), "b": (1,)}, "both c"),
        ((names.Cut("a", (("b", 3), ("c", 2))),), {"a": (6, 2)}, "expected 5 rows"),
        ((names.Cut("a", (("b", 1),)),), {"a": ()}, "expected 1 rows"),
        ((names.Unstack("a", "{e}"),), {"a": (1 << 40, 0)}, "experts"),
        ((names.Unstack("a", "{e}"),), {"a": ()}, "experts"),
        ((names.Transposed("a"),), {"a": (3,)}, "two dimensions"),
        ((names.Permuted("a", 3),), {"a": (8, 2)}, "3 heads"),
        ((names.Squeezed("a", 1),), {"a": (8, 2)}, "not 1"),
        ((names.Deinterleave("a", ("b", "c")),), {"a": (7,)}, "interleaved"),
        ((names.Join(r"s(\d)", "t"),), {"s1": (1, 2), "s2": (1, 3)}, "shapes"),
        ((names.Join(r"s0?(\d)", "t"),), {"s1": (1, 2), "s01": (1, 2)}, "twice"),
        ((names.Join(r"s(\d)", "t"), names.Transposed("t")), {"s1": (1, 2), "s2": (1, 2)}, "already joined"),
    ],
)
def test_files_of_another_layout_are_refused(ops: names.NameMap, shapes: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(TensorMismatch, match=says):
        names.resolve(ops, stored(**shapes))
