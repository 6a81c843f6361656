"""Watching over a job: calls that do not match, ranks that do not come, processes that end."""
