"""What is served, a module for each group of routes."""
