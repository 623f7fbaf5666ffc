"""The errors that a caller can meet. Every message names the field, its value and the remedy.

Every error that a user can cause is one of these classes, and is raised on all ranks. `assert` is for bugs of this
package.
"""

import torch


class EPMoEError(Exception):
    """Base of all errors that `ep_moe` raises on purpose."""

    agreed_by: object | None = None  # the consensus that raised it on all its ranks; None for an error of one rank


class ConfigError(EPMoEError, ValueError):
    """A configuration, layout, expert map or environment that cannot work. Raised before any collective."""


class NoRoom(ConfigError):
    """The remaining ranks have too few slots for all experts."""


class InputError(EPMoEError, ValueError):
    """A bad argument of one call: shape, dtype, device or expert id. All ranks of the call raise it."""


class CheckpointError(EPMoEError, ValueError):
    """A checkpoint with a missing, misshapen or unreadable tensor."""


class BackendUnavailable(EPMoEError, RuntimeError):
    """A backend that the user named cannot run here. The message says why, and names backends that can."""


class PeerTimeout(EPMoEError, RuntimeError):
    """A peer died, hung, or runs another call than this rank. The message names the phase and the ranks."""


class ContextClosed(EPMoEError, RuntimeError):
    """An `EPContext` was used after its `destroy`, or after `destroy_process_group` ended its groups."""


class RankFailed(EPMoEError, RuntimeError):
    """An exception left a layer's call on one rank while its peers were in the same call.

    The message names the rank and the exception. The context cannot be used again: every later call raises this error
    on all ranks.
    """


class OutOfMemory(EPMoEError, torch.OutOfMemoryError):
    """One rank ran out of device memory in a layer's call.

    The message names the rank, the device, the step and the remedy. As with `RankFailed`, all ranks raise it, and the
    context cannot be used again.
    """


class RebalanceError(EPMoEError, RuntimeError):
    """A rebalance was rolled back: all ranks use the previous expert maps again.

    The message says what went wrong, on which rank, and whether the balancer continues.
    """
