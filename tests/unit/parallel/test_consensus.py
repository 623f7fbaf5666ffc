"""Agreements of ranks, on one rank."""

import pytest

from ep_moe import InputError
from ep_moe.parallel.consensus import StoreConsensus


def test_an_error_that_ranks_agreed_on_leaves_the_agreement_around_it_as_it_is():
    """To agree on it again would need all ranks once more."""
    consensus, raised = StoreConsensus(None, [0], 0, 1.0), []

    def fails():
        try:
            consensus.healthy("one", InputError("bad"))
        except InputError as error:
            raised.append(error)
            raise

    with pytest.raises(InputError, match="bad") as left, consensus.together("all"):
        fails()
    assert left.value is raised[0]
