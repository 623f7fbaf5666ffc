"""The errors that a caller can meet. Every message names the field, its value and the remedy.

`assert` is for our own bugs; everything a user can cause is one of these, raised on all ranks alike.
"""

import torch


class EPMoEError(Exception):
    """Base of all errors that `ep_moe` raises on purpose."""

    agreed_by: object | None = None  # mark of the agreement that raised it on all its ranks, None for one rank's error


class ConfigError(EPMoEError, ValueError):
    """A configuration, layout, map or environment that cannot work; raised before any collective."""


class NoRoom(ConfigError):
    """The ranks that are left have too few slots for all experts."""


class InputError(EPMoEError, ValueError):
    """A bad argument of one call: shape, dtype, device or expert id; all ranks of the call raise it."""


class CheckpointError(EPMoEError, ValueError):
    """A checkpoint with a missing, misshapen or unreadable tensor."""


class BackendUnavailable(EPMoEError, RuntimeError):
    """A backend named by the user cannot run here; the message says why and names those that can."""


class PeerTimeout(EPMoEError, RuntimeError):
    """A peer died, hung or went another way; the message names the phase and the ranks."""


class ContextClosed(EPMoEError, RuntimeError):
    """A use of an `EPContext` after its `destroy`, or after `destroy_process_group` ended its groups."""


class RankFailed(EPMoEError, RuntimeError):
    """An exception left a layer's call on one rank, while its peers were in the same call. The message names the rank
    and the exception. The context cannot be used again, and each further call raises this on all ranks."""


class OutOfMemory(EPMoEError, torch.OutOfMemoryError):
    """One rank ran out of device memory in a layer's call. The message names the rank, the device, the step and the
    remedy. As `RankFailed`, all ranks raise it, and the context cannot be used again."""


class RebalanceError(EPMoEError, RuntimeError):
    """A rebalance was rolled back: the maps that were in force before are in force on all ranks. The message says what
    went wrong, on which rank, and whether the balancer goes on."""
