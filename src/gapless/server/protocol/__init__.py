"""What goes over the wire, as pydantic models: requests are checked with them, answers are only described by them."""
