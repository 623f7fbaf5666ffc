"""What kernels of transports and experts are made of alike: launches, waiting, rows in fp8, ids."""
