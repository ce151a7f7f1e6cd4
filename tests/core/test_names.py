"""Names that become paths, and suggestions for wrong ones."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError, check_name, nearest


@given(st.from_regex(r"[A-Za-z0-9._-]{1,80}", fullmatch=True).filter(lambda name: name.strip(".")))
def test_safe_names_pass_and_stay_inside_their_folder(name: str) -> None:
    assert check_name(name, field="study") == name
    folder = Path("/state/studies")
    assert (folder / name).resolve().parent == folder


@given(st.text(max_size=90))
def test_any_text_passes_or_is_refused(name: str) -> None:
    safe = re.fullmatch(r"[A-Za-z0-9._-]{1,80}", name) is not None and name.strip(".") != ""
    if safe:
        assert check_name(name, field="study") == name
    else:
        with pytest.raises(SpecError, match=r"study = .*must match"):
            check_name(name, field="study")


@pytest.mark.parametrize("name", ["", ".", "..", "...", "a/b", "../x", "a b", "a\n", "é", "a" * 81, "a\0"])
def test_unsafe(name: str) -> None:
    with pytest.raises(SpecError, match=r"fix: use letters, digits, dots, dashes, underscores") as error:
        check_name(name, field="study")
    assert "\n" not in str(error.value)


def test_the_three_nearest_best_first() -> None:
    known = ["h100-ndr", "h800-ndr", "a100-80gb-hdr", "v100-25gbe", "h800-ndr"]
    assert nearest("H800", known) == ["h800-ndr", "h100-ndr", "v100-25gbe"]
    assert nearest("x", [], count=3) == []


@given(st.text(max_size=10), st.lists(st.text(max_size=10), max_size=8))
def test_nearest_are_known_and_distinct(name: str, known: list[str]) -> None:
    found = nearest(name, known)
    assert len(found) == min(3, len(set(known))) == len(set(found))
    assert set(found) <= set(known)
    if name in known and name == name.lower():
        assert found[0].lower() == name
