"""The path of a call from its arguments to its route: plan, queue, execution, Work."""
