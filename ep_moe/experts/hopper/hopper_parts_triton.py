"""What the kernels for Hopper in Gluon share: the stages of a ring of buffers, and activations."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Of a ring of buffers, whose barriers change their phase with each round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def activate(to, gate, up, ACTIVATION: gl.constexpr):
    if ACTIVATION == "relu2":
        positive = gl.where(gate < 0.0, 0.0, gate)
        return positive * positive
    elif ACTIVATION == "swiglu":  # noqa: RET505  (the compiler wants one chain)
        return gate / (1.0 + gl.exp(-gate)) * up
    elif ACTIVATION == "geglu":
        return 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476)) * up
    else:
        gl.static_assert(ACTIVATION == "swiglu_clamped")
        alpha = to[3]
        limit = to[4]
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, up)
        up = gl.where(up < -limit, -limit, up)
        return (up + 1.0) * (gate / (1.0 + gl.exp(-alpha * gate)))
