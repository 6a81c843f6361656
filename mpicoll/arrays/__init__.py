"""Arrays of any library as views of memory."""
