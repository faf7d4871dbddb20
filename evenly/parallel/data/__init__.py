"""The data axis: gradients, ZeRO, replicas."""
