"""The pages, what generates some of them, and what runs the commands that they show."""
