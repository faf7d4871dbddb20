"""What a GPU is asked in ten minutes, step by step; see README.md."""
