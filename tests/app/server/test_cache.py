"""The cache is bounded in bytes and evicts what was used least recently."""

from __future__ import annotations

from vitrail.app.server.cache import ByteCache


def test_the_least_recently_used_values_are_evicted() -> None:
    evicted: list[str] = []
    cache: ByteCache[str, bytes] = ByteCache(10, len, evicted.append)
    for key in "abc":
        cache[key] = bytes(3)
    assert cache.get("a") == bytes(3)
    cache["d"] = bytes(3)
    assert evicted == ["b"]
    assert cache.currsize == 9
    cache["d"] = bytes(2)
    assert cache.currsize == 8
    assert cache.get("b") is None


def test_a_value_larger_than_the_cache_is_kept_alone() -> None:
    evicted: list[str] = []
    cache: ByteCache[str, bytes] = ByteCache(10, len, evicted.append)
    cache["small"] = bytes(3)
    cache["large"] = bytes(100)
    assert list(cache) == ["large"]
    assert evicted == ["small"]
    cache["small"] = bytes(3)
    assert list(cache) == ["small"]
    cache.clear()
    assert cache.currsize == 0
    assert evicted == ["small", "large"]  # clearing is not eviction
