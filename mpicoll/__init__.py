"""mpicoll."""
