"""A plain one-device loop, and the engine held against it tensor by tensor."""
