#!/usr/bin/env bash
# One node, one process per GPU. Arguments go to `ep-moe run`:
#
#     launch/torchrun_node.sh --model /models/Qwen3-30B-A3B --text sample.txt --dp 8
#
# NPROC_PER_NODE sets another number of processes, for example 4 on a machine without a GPU.
set -euo pipefail

# --standalone picks a free port, so that two jobs can share the node
exec torchrun --standalone --nproc-per-node "${NPROC_PER_NODE:-gpu}" -m ep_moe run "$@"
