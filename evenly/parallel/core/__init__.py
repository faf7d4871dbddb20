"""What every axis uses: initialisation, calls of blocks, views of parameters, recomputation, memory, guards."""
