"""`echo-explore convert`: formats by their endings, refusals in one line."""

import pytest

from echo_explore.graph import load_graph, save_chakra, save_graph
from tests.cli.support import Cli
from tests.graph.test_storage import graph, same


def test_native_to_chakra_and_back(cli: Cli) -> None:
    save_graph(cli.folder / "a.npz", graph(30))
    for given, wanted in (("a.npz", "b.et"), ("b.et", "c.npz")):
        done = cli("convert", given, "--out", wanted)
        assert (done.code, done.err) == (0, "")
        assert f"{cli.folder / wanted}: {graph(30).num_ops} rows" in done.out
    assert same(load_graph(cli.folder / "c.npz"), graph(30))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.et", "--out", "x.npz"], "file = 'gone.et': does not exist"),
        (["cut.et", "--out", "x.npz"], "is a Chakra trace that breaks after 31 nodes: byte "),
        (["json.et", "--out", "x.npz"], "is JSON, no Chakra trace (byte 0)"),
        (["cut.json", "--out", "x.npz"], "is no JSON trace: "),
        (["a.csv", "--out", "x.npz"], "must end in .npz, .et, .json or .json.gz"),
        (["cut.et", "--out", "x.csv"], "must end in .npz (native) or .et (Chakra)"),
        (["whole.et", "--out", "cut.et"], "exists, and nothing is overwritten"),
    ],
)
def test_refusals(cli: Cli, arguments: list[str], message: str) -> None:
    save_chakra(cli.folder / "whole.et", graph(30))
    (cli.folder / "cut.et").write_bytes((cli.folder / "whole.et").read_bytes()[:-5])
    (cli.folder / "json.et").write_text('{"traceEvents": []}')
    (cli.folder / "cut.json").write_text('{"traceEvents": [')
    assert message in cli.refuses("convert", *arguments)
