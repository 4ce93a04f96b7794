"""Committed tables: what each runtime must be able to do. Data only."""
