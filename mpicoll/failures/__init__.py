"""Failures: collective mismatches, timeouts, lost ranks, hang reports and the end of a job."""
