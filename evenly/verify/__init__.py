"""A plain one-device loop, and the comparison of the engine with it, tensor by tensor."""
