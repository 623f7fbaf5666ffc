#!/usr/bin/env bash
# Any program on this node, one process per GPU. Arguments are what torchrun runs: a script, or -m and a module, and its
# own arguments.
#
#     launch/torchrun_node.sh train.py --steps 100
#     launch/torchrun_node.sh -m ep_moe run /models/Qwen3-30B-A3B --text sample.txt --dp 8
#
# On two nodes, the same command on each of them, where `head` is the first one:
#
#     NNODES=2 ENDPOINT=head:29500 launch/torchrun_node.sh train.py --steps 100
#
#     NNODES          nodes; default 1
#     ENDPOINT        host and port of the first node; needed for more than one node. The next port is open too.
#     JOB_ID          the same on all nodes, another for another job; default ep_moe
#     NPROC_PER_NODE  processes per node; default one per GPU. For example 4 on a machine without a GPU
#     PREFLIGHT       0 leaves `ep-moe doctor --cluster` out; else the job stops if that finds something odd
set -euo pipefail

if (($# == 0)); then
    echo "usage: launch/torchrun_node.sh SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS]" >&2
    exit 2
fi
nodes=${NNODES:-1}
if ((nodes > 1)) && [[ ! "${ENDPOINT:-}" =~ ^.+:[0-9]+$ ]]; then
    echo "ENDPOINT must be HOST:PORT of the first node for NNODES=$nodes, got '${ENDPOINT:-}'" >&2
    exit 2
fi

run() { # what it is, how many ports behind ENDPOINT it meets, the program
    local what=$1 ahead=$2
    shift 2
    local meeting=(--standalone) # picks a free port, so that two jobs can share the node
    if ((nodes > 1)); then
        meeting=(--nnodes "$nodes" --rdzv-id "${JOB_ID:-ep_moe}-$what" --rdzv-backend c10d)
        meeting+=(--rdzv-endpoint "${ENDPOINT%:*}:$((${ENDPOINT##*:} + ahead))")
    fi
    torchrun "${meeting[@]}" --nproc-per-node "${NPROC_PER_NODE:-gpu}" "$@"
}

if [[ "${PREFLIGHT:-1}" != 0 ]]; then
    run preflight 1 -m ep_moe doctor --cluster # on another port: this node may be done before the first one has left it
fi
run job 0 "$@"
