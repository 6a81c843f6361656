"""The routes of host memory."""
