"""Content hashes: equal contents, equal hashes; nothing that JSON cannot say."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import canonical_json, content_hash
from echo_explore.core.hashing import bytes_hash, file_hash, finite_or_none

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_round_trip(value: object) -> None:
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), values, max_size=5))
def test_order_of_keys_does_not_matter(table: dict[str, object]) -> None:
    other = dict(reversed(table.items()))
    assert canonical_json(other) == canonical_json(table)
    assert content_hash(other) == content_hash(table)


@given(values, values)
def test_different_contents_have_different_hashes(one: object, other: object) -> None:
    assert (content_hash(one) == content_hash(other)) == (canonical_json(one) == canonical_json(other))


def test_known_value() -> None:
    """The same on every machine and Python: sha256 of `{"a":[1,2.5,null]}`."""
    assert content_hash({"a": [1, 2.5, None]}) == "d975df8927b51788"
    assert content_hash({"a": [1, 2.5, None]}, num_hex=8) == "d975df89"


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": {"b": math.nan}}])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)


def test_hash_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    assert file_hash(path, num_hex=64) == bytes_hash(b"abc")
    assert bytes_hash(b"abc").startswith("ba7816bf8f01cfea")  # FIPS 180-2 (2002), appendix B.1


@pytest.mark.parametrize(("value", "shown"), [(1.5, 1.5), (0.0, 0.0), (math.nan, None), (-math.inf, None)])
def test_finite_or_none(value: float, shown: float | None) -> None:
    assert finite_or_none(value) == shown
