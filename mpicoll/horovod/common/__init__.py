"""Classes and functions that do not depend on a framework."""
