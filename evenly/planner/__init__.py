"""What a plan costs, told before it runs; never runs anything."""
