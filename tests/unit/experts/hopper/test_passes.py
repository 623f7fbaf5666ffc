"""Test how received rows are split into parts, and where the results of each part are written."""

import pytest
import torch

from ep_moe.experts.hopper.route_sort import PeerAddresses, passes


@pytest.mark.parametrize("returned", [1, 3])
def test_parts_begin_with_the_own_rows_and_each_has_its_first(returned):
    """The first part starts with the rank's own rows, and each part knows its first row.

    4 ranks sent up to 5 rows each, in parts of 5.
    """
    peers = PeerAddresses(torch.zeros(4), 0, 5 * returned, 2)
    found = passes(20, 5, peers, returned)
    assert [part.start for part, _ in found] == [10, 15, 0, 5]
    assert all(part.stop == part.start + 5 for part, _ in found)
    assert [to.first for _, to in found] == [part.start * returned for part, _ in found]
    assert passes(7, 5, None) == [(slice(0, 5), None), (slice(5, 7), None)]
