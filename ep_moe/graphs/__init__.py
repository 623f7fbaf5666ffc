"""Calls of a layer as CUDA graphs: captured by the user (`captured`), or repeated by the layer itself (`repeated`)."""
