"""Observation of a run: metrics, progress, reports, alarms."""
