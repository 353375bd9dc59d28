"""Small worlds of data with tools."""
