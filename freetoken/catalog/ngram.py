"""The integers behind a hashed n-gram embedding: primes, offsets and multipliers. Pure.

Facts: transformers 5.24, Qwen4ExpTextNGramEmbedding. Every head hashes an n-gram into a table of prime length, the
tables of all heads lie one after another, and each token position has an odd 64-bit multiplier from splitmix64.
Does not know tensors: the lookup itself is the engine's.
"""

from __future__ import annotations

from functools import lru_cache

from freetoken.catalog.spec import NGram

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough below 3.3e24 (Sorenson and Webster 2015)


def head_count(spec: NGram) -> int:
    """Heads of all n-gram lengths 2 .. ngram together."""
    return (spec.ngram - 1) * spec.heads


def head_rows(spec: NGram) -> tuple[int, ...]:
    """Table length of every head: consecutive primes from `base` on, continued from layer to layer."""
    heads = head_count(spec)
    return _primes_from(spec.base, (spec.order + 1) * heads)[spec.order * heads :]


def head_offsets(spec: NGram) -> tuple[int, ...]:
    """First table row of every head."""
    rows = head_rows(spec)
    return tuple(sum(rows[:head]) for head in range(len(rows)))


def table_shape(spec: NGram) -> tuple[int, int]:
    """(rows, channels) of the whole table; rows are rounded up to a multiple of `pad`."""
    rows = sum(head_rows(spec))
    return -(-rows // spec.pad) * spec.pad, spec.dim // head_count(spec)


def multipliers(spec: NGram, vocab: int) -> tuple[int, ...]:
    """One odd int64 for each position of an n-gram, the newest first."""
    bound = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    base = spec.seed + 10007 * spec.order
    return tuple(2 * (_splitmix64((base + _GAMMA * (k + 1)) & _MASK) % bound) + 1 for k in range(spec.ngram))


def _splitmix64(x: int) -> int:
    """One output of the splitmix64 generator (Steele, Lea and Flood 2014) at state x."""
    x = (x + _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@lru_cache(maxsize=64)
def _primes_from(start: int, count: int) -> tuple[int, ...]:
    primes: list[int] = []
    candidate = start
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)


def _is_prime(n: int) -> bool:
    """Miller and Rabin's test with witnesses that make it exact here."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, witness, odd, twos) for witness in _WITNESSES)


def _passes(n: int, witness: int, odd: int, twos: int) -> bool:
    x = pow(witness, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False
