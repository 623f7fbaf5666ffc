"""What a run's report draws."""

import sys
from types import SimpleNamespace
from unittest import mock

from ep_moe.cli.reports import plot_load


def test_a_heat_map_has_loads_over_their_layers_mean(tmp_path):
    """matplotlib need not be installed: what it would be given is looked at."""
    figure = mock.MagicMock()
    maps = figure.subplots.return_value = mock.MagicMock(), mock.MagicMock()
    report = SimpleNamespace(title="a run", expert_load=[[1, 3, 0, 0], [0, 0, 0, 0]], rank_load=[[4, 0], [0, 0]])
    modules = {"matplotlib": mock.MagicMock(), "matplotlib.figure": SimpleNamespace(Figure=lambda **_: figure)}
    with mock.patch.dict(sys.modules, modules):
        plot_load(report, str(tmp_path / "load.png"))
    drawn = [axes.imshow.call_args.args[0] for axes in maps]
    assert drawn == [[[1.0, 3.0, 0.0, 0.0], [0.0] * 4], [[2.0, 0.0], [0.0] * 2]]
    titles = [axes.set.call_args.kwargs["title"] for axes in maps]
    assert titles == ["load / mean by expert: fullest 3.00", "load / mean by EP rank: fullest 2.00"]
    figure.savefig.assert_called_once_with(str(tmp_path / "load.png"), dpi=120)
