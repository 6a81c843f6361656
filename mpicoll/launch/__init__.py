"""Rank, size and the world communicator under any launcher."""
