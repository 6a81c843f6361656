"""Watching a job: calls that do not match, ranks that are late or lost, processes that end."""
