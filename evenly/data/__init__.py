"""WHICH sample WHEN: the global order, microbatches, shares, and the loader that follows them."""
