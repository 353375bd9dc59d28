"""Metrics, intervals, reports."""
