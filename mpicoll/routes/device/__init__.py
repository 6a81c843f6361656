"""The routes of device memory."""
