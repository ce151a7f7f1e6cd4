"""`clusters | models | spaces | stacks`: list, show, write a template."""

import pytest

from echo_explore.cli.catalog import KINDS, Kind
from echo_explore.core.home import list_data_files
from tests.cli.support import Cli, predict


@pytest.mark.parametrize("kind", KINDS)
def test_list(cli: Cli, kind: Kind) -> None:
    done = cli(kind)
    assert (done.code, done.err) == (0, "")
    names = [line.split()[0] for line in done.out.splitlines()]
    assert names == list(list_data_files(kind))
    assert all(len(line.split()) > 3 for line in done.out.splitlines())


@pytest.mark.parametrize("kind", KINDS)
def test_show_prints_the_file_with_its_sources(cli: Cli, kind: Kind) -> None:
    name, path = next(iter(list_data_files(kind).items()))
    done = cli(kind, "--show", name)
    assert done.code == 0
    assert done.out == f"# {path}\n{path.read_text(encoding='utf-8')}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_loads_as_it_stands(cli: Cli, kind: Kind) -> None:
    done = cli(kind, "--new", "mine.toml")
    assert done.code == 0
    assert done.out == f"{cli.folder / 'mine.toml'}\n"
    assert cli(kind, "--show", "./mine.toml").code == 0
    assert "exists, and nothing is overwritten" in cli.refuses(kind, "--new", "mine.toml")


def test_a_file_of_the_user_is_found_by_name(cli: Cli) -> None:
    (cli.home / "clusters").mkdir(parents=True)
    assert cli("clusters", "--new", "home/clusters/lab.toml").code == 0
    assert "lab " in cli("clusters").out
    assert cli(*predict("--dry-run", cluster="lab")).code == 0


def test_what_is_listed_but_wrong_is_told(cli: Cli) -> None:
    (cli.home / "clusters").mkdir(parents=True)
    (cli.home / "clusters/broken.toml").write_text("schema = 1\n")
    assert "broken.toml: " in cli.refuses("clusters", "--show", "broken")
