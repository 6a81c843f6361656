"""Process groups, checked arguments, call signatures, plans, and Work."""
