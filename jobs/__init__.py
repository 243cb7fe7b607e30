"""Launching: a sweep file becomes jobs, jobs become records. Importing it never imports torch."""
