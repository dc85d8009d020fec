"""Frames: what goes in comes out, and nothing but EngineProtocolError comes out of bytes that are wrong."""

from __future__ import annotations

import asyncio
import struct
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.core import events
from freetoken.core.errors import EngineProtocolError
from freetoken.core.types import FinishReason, GenerateRequest, SamplingParams, TokenLogprob
from freetoken.core.units import Bytes, Seconds
from freetoken.wire import codec, translate
from freetoken.wire import messages as m

SAMPLING = SamplingParams(temperature=0.3, seed=2**40, logit_bias=((5, -100.0),), logprobs=2, max_tokens=9)
EXAMPLES: list[m.Message] = [
    m.Hello(proto=1, instance_id="i", nonce="n", build="b"),
    m.Load(plan={"resolved": {"threads": {"value": 2}}, "verdict": None}, files={"model": "/m"}),
    m.Submit(id="a", token_ids=(1, 2**31), sampling=SAMPLING, eos_ids=(2,), deadline_ms=5),
    m.Cancel(id="a"),
    m.Status(),
    m.Drain(deadline_ms=7),
    m.Shutdown(),
    m.Phase(name="read_weights", done=1, total=2**40, unit="bytes"),
    m.Ready(plan={}, measured={"load_s": 1.5, "pages": 3, "numa": None, "pinned": True, "isa": "avx2"}),
    m.Tokens(
        id="a",
        token_ids=(3,),
        logprobs=(TokenLogprob(3, -0.25, ((3, -0.25), (4, -2.0))),),
        cached=0,
        finish=FinishReason.LENGTH,
        limited_by="kv_pool",
    ),
    m.Progress(id="a", done=1, total=2),
    m.Failed(code="X", detail="d", id="a", numbers={"n": 1, "f": 0.5, "s": "x"}),
    m.Stats(
        running=1,
        queued=0,
        pages_total=3,
        pages_free=1,
        pages_cached=1,
        prompt_tokens=1,
        output_tokens=1,
        cached_tokens=0,
        decode_tok_s=1.5,
        prefill_tok_s=0.0,
        rss_bytes=2**33,
        layers_routed=1,
        experts=2,
        expert_tokens=((3, 4),),
        hits={"slot": 1},
    ),
    m.Beat(step=1, step_age_ms=0),
    m.Log(level="info", line="é"),
]


def decoder_for(message: m.Message) -> msgspec.msgpack.Decoder[object]:
    return codec.UP if isinstance(message, get_args(m.Up)) else codec.DOWN  # type: ignore[return-value]


async def _read_all(data: bytes, decoder: msgspec.msgpack.Decoder[object]) -> list[object]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found = []
    while (message := await codec.read(reader, decoder)) is not None:
        found.append(message)
    return found


def read_all(data: bytes, decoder: msgspec.msgpack.Decoder[object] = codec.DOWN) -> list[object]:  # type: ignore[assignment]
    return asyncio.run(_read_all(data, decoder))


def test_every_message_of_the_wire_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == {*get_args(m.Up), *get_args(m.Down)}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: m.Message) -> None:
    assert read_all(codec.encode(message) * 2, decoder_for(message)) == [message, message]


def test_a_frame_is_a_big_endian_length_and_msgpack_with_a_type() -> None:
    frame = codec.encode(m.Cancel(id="a"))
    assert struct.unpack(">I", frame[:4])[0] == len(frame) - 4
    assert msgspec.msgpack.decode(frame[4:]) == {"type": "cancel", "id": "a"}


@given(
    st.lists(st.integers(0, 2**31), max_size=50),
    st.floats(0, 2, allow_nan=False),
    st.none() | st.integers(0, 2**62),
)
def test_requests_and_their_twins_are_the_same(ids: list[int], temperature: float, seed: int | None) -> None:
    request = GenerateRequest("r", tuple(ids), SamplingParams(temperature=temperature, seed=seed), (1,), 10)
    (message,) = read_all(codec.encode(translate.submit(request)))
    assert isinstance(message, m.Submit) and translate.request(message) == request


@pytest.mark.parametrize(
    "event",
    [
        events.Progress(3, 9),
        events.Tokens((1, 2), (TokenLogprob(1, -0.5),), 16, FinishReason.STOP),
        events.Tokens((), finish=FinishReason.LENGTH, limited_by="kv_pool"),
        events.Failed("QUEUE_TIMEOUT", "waited", {"position": 2}),
    ],
    ids=repr,
)
def test_events_and_their_twins_are_the_same(event: events.GenerationEvent) -> None:
    (message,) = read_all(codec.encode(translate.message("r", event)), codec.UP)  # type: ignore[arg-type]
    assert message.id == "r" and translate.event(message) == event  # type: ignore[attr-defined,arg-type]


def test_sizes_and_durations_of_a_plan_travel_as_numbers() -> None:
    (message,) = read_all(codec.encode(m.Load(plan={"b": Bytes(3), "s": Seconds(0.5)}, files={})))
    assert message == m.Load(plan={"b": 3, "s": 0.5}, files={})


def test_a_frame_beyond_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(EngineProtocolError, match="16777216"):
        codec.encode(m.Log(level="info", line="x" * codec.MAX_FRAME_BYTES))
    with pytest.raises(EngineProtocolError, match="4294967295"):  # before anything of that size is allocated
        read_all(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "nonsense"}),
        msgspec.msgpack.encode({"type": "cancel"}),
        msgspec.msgpack.encode({"type": "cancel", "id": 3}),
        msgspec.msgpack.encode({"type": "tokens", "id": "a", "token_ids": [1]}),  # goes up, not down
        b"\x82\xa4type\xa6cancel\xa2id\xa1\xff",  # not UTF-8
        msgspec.msgpack.encode({"type": "cancel", "id": "a"}) + b"\x00",
    ],
)
def test_a_malformed_payload_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        read_all(struct.pack(">I", len(payload)) + payload)


@given(st.binary(max_size=200))
def test_random_bytes_give_messages_or_a_protocol_error(data: bytes) -> None:
    for stream in (data, struct.pack(">I", len(data)) + data):
        try:
            read_all(stream)
        except EngineProtocolError:
            continue


def test_a_cut_frame_is_an_error_and_a_clean_end_is_not() -> None:
    frame = codec.encode(m.Cancel(id="a"))
    assert read_all(b"") == []
    for cut in range(1, len(frame)):
        with pytest.raises(EngineProtocolError, match="inside a message"):
            read_all(frame[:cut])


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (None, "did not begin"),
        (m.Status(), "did not begin"),
        (m.Hello(proto=m.PROTO, instance_id="i", nonce="other", build="b"), "another secret"),
        (m.Hello(proto=m.PROTO + 1, instance_id="i", nonce="n", build="9.9"), "speaks protocol 2 .version 9.9., this"),
    ],
)
def test_a_wrong_hello_says_what_is_wrong(first: m.Message | None, reason: str) -> None:
    with pytest.raises(EngineProtocolError, match=reason):
        codec.check_hello(first, "n")
