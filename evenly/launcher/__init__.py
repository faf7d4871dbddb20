"""WHO AM I: starting processes, watching them, and what a process finds of itself. No torch at import."""
