"""Random modules under random plans, each held against one device."""
