"""Bundled tool files and the published JSON Schemas."""
