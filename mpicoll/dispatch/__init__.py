"""The way of every call: from checked arguments to its route and, if asked for, its Work."""
