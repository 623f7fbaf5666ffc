#!/usr/bin/env bash
# torchrun's PYTHON_EXEC: Python without -u, under which a line of several words is several writes and ranks mix them.
[ "$1" = -u ] && shift
exec python "$@"
