"""Search over layouts: legal points, ledger, driver; `study` holds Optuna, `pool` holds Ray.

The package can be called: `echo_explore.search(space, ...)` is an entry point of the same name (see api.py), and Python
puts the package in its place as soon as any of its modules is imported.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo_explore.search.result import SearchResult


class _CallablePackage(ModuleType):
    def __call__(self, space: str | Path, **options: Any) -> "SearchResult":
        """The best layouts of a search space; `options` are the fields of search.options.SearchOptions."""
        from echo_explore.search.run import SearchOptions, run_search

        return run_search(SearchOptions(space=str(space), **options))


sys.modules[__name__].__class__ = _CallablePackage
