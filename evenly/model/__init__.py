"""Reading a module: its blocks."""
