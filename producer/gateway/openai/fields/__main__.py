"""Writes the reference of all fields to standard output."""

from .field_reference import render_fields

print(render_fields(), end="")
