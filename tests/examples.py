"""How many examples a property is tried on: all in `make test-all`, some of them in `make test`."""

from typing import Any

from hypothesis import settings


def examples(count: int, *, quick: int | None = None, **more: Any) -> settings:
    """Settings for `count` examples under the profile `full`, else for `quick` of them, by default two fifths."""
    is_full = (
        settings.default is not None and settings.default.max_examples >= settings.get_profile("full").max_examples
    )
    return settings(max_examples=count if is_full else quick or max(count * 2 // 5, 5), **more)
